#!/bin/sh
# Users and roles of an etcd hub, so that a region can write its own keys and nobody else's. Run by an operator with
# etcdctl's own variables (ETCDCTL_ENDPOINTS, ETCDCTL_CACERT, and once auth is on ETCDCTL_USER=root:PASSWORD).
# Passwords come on standard input, so that they are in no list of processes' arguments of this script.
#
#   roles.sh region paris    < paris.password      # its balancers, of both tiers
#   roles.sh operators       < operators.password  # whoever uses farhop law, drain, bias, ...
#   roles.sh enable          < root.password       # at last: from here on nobody comes in without
set -eu

usage() { echo "usage: roles.sh region NAME | operators | enable   (the password on standard input)" >&2; exit 2; }

secret() {
  IFS= read -r password || [ -n "${password:-}" ] || { echo "roles.sh: no password on standard input" >&2; exit 2; }
}

user() { # NAME ROLE
  printf '%s\n' "$password" | etcdctl user add "$1" --interactive=false > /dev/null
  etcdctl user grant-role "$1" "$2" > /dev/null
}

case "${1:-}" in
  region)
    name="${2:-}"
    case "$name" in '' | *[!a-z0-9._-]*) usage ;; esac
    secret
    etcdctl role add "farhop-$name" > /dev/null
    # Everybody reads everything: reports of all regions, the law, overrides.
    etcdctl role grant-permission "farhop-$name" --prefix=true read /farhop/v1/ > /dev/null
    # Its own reports, and replicas that register themselves.
    etcdctl role grant-permission "farhop-$name" --prefix=true readwrite "/farhop/v1/region/$name/" > /dev/null
    etcdctl role grant-permission "farhop-$name" --prefix=true readwrite "/farhop/v1/replica/$name/" > /dev/null
    # Where operators' commands reach the admin port of its global balancers.
    etcdctl role grant-permission "farhop-$name" --prefix=true readwrite "/farhop/v1/entry/$name/" > /dev/null
    # Which of its balancers lends out the limits whose home it is: without that such tenants get 429.
    etcdctl role grant-permission "farhop-$name" readwrite "/farhop/v1/limit-root/$name" > /dev/null
    # What the announcer of its entry says of itself.
    etcdctl role grant-permission "farhop-$name" --prefix=true readwrite "/farhop/v1/announce/$name/" > /dev/null
    # How far clients' networks are from its entry, for DNS servers.
    etcdctl role grant-permission "farhop-$name" --prefix=true readwrite "/farhop/v1/latency/$name/" > /dev/null
    # A hub that lacks the law is given it by any balancer. Sign laws: then it can be no other.
    etcdctl role grant-permission "farhop-$name" readwrite /farhop/v1/policy/law > /dev/null
    user "$name" "farhop-$name"
    echo "user $name: reads /farhop/v1/, writes region/, replica/, entry/, announce/, latency/ and limit-root/ of $name, and policy/law"
    ;;
  operators)
    secret
    etcdctl role add farhop-operators > /dev/null
    etcdctl role grant-permission farhop-operators --prefix=true readwrite /farhop/v1/ > /dev/null
    user operators farhop-operators
    echo "user operators: reads and writes /farhop/v1/"
    ;;
  enable)
    secret
    user root root
    etcdctl auth enable
    ;;
  *) usage ;;
esac
