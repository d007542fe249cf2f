{{/* Names and what is derived. Called with a dict: root ($), tier ("global", "regional", "dns" or "anycast"). */}}

{{- define "farhop.name" -}}
{{- /* of a long name of a release the end goes, never the tier: two tiers would be one */ -}}
{{- printf "%s-%s" (trunc (int (sub 51 (len .tier))) .root.Release.Name | trimAll "-.") .tier -}}
{{- end -}}

{{- define "farhop.selector" -}}
app.kubernetes.io/name: farhop
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .tier }}
{{- end -}}

{{- define "farhop.labels" -}}
{{ include "farhop.selector" . }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
app.kubernetes.io/part-of: {{ .root.Values.fleet | trunc 63 | trimAll "-._" | quote }}
helm.sh/chart: {{ printf "%s-%s" .root.Chart.Name .root.Chart.Version }}
farhop.dev/region: {{ .root.Values.region }}
{{- end -}}

{{- define "farhop.image" -}}
{{- with .Values.image -}}
{{- if .digest -}}{{ .repository }}@{{ .digest }}{{- else -}}{{ .repository }}:{{ default $.Chart.AppVersion .tag }}{{- end -}}
{{- end -}}
{{- end -}}

{{- define "farhop.topologyMap" -}}
{{- default (printf "%s-topology" .Release.Name) .Values.topology.configMap -}}
{{- end -}}

{{- define "farhop.tlsSecret" -}}
{{- if eq .root.Values.tls.source "secret" -}}
{{- get .root.Values.tls.secrets .tier -}}
{{- else -}}
{{- include "farhop.name" . }}-tls
{{- end -}}
{{- end -}}

{{/* What cannot be right is said here, in a line, and not by a pod that does not start. */}}
{{- define "farhop.checked" -}}
{{- $v := .Values -}}
{{- if not (or $v.global.enabled $v.regional.enabled $v.dns.enabled) -}}
{{- fail "global.enabled, regional.enabled: both are false, and dns.enabled is; enable one, or uninstall the release" -}}
{{- end -}}
{{- if and $v.topology.configMap $v.topology.document -}}
{{- fail "topology: configMap and document are both given; leave one of them out" -}}
{{- end -}}
{{- if not (or $v.topology.configMap $v.topology.document) -}}
{{- fail "topology: is not given; name a ConfigMap with the key world.yaml (topology.configMap), or give topology.document" -}}
{{- end -}}
{{- if not (has $v.hop.active $v.hop.keys) -}}
{{- fail (printf "hop.active: %q is not among hop.keys (%s)" $v.hop.active (join ", " $v.hop.keys)) -}}
{{- end -}}
{{- if and (eq $v.tls.source "certManager") (not $v.tls.issuer.name) -}}
{{- fail "tls.issuer.name: is not given; name a cert-manager issuer, give secrets (tls.source: secret), or say tls.source: none for a trial" -}}
{{- end -}}
{{- range $tier := list "global" "regional" "dns" "anycast" -}}
{{- $one := get $v $tier -}}
{{- if and $one.enabled (eq $v.tls.source "secret") (not (get $v.tls.secrets $tier)) -}}
{{- fail (printf "tls.secrets.%s: is not given; name a Secret with tls.crt, tls.key and ca.crt (%s)" $tier (ternary "for its admin port" (printf "`farhop certs issue %s %s` makes them" $tier $v.region) (has $tier (list "dns" "anycast")))) -}}
{{- end -}}
{{- if and $one.autoscaling (gt (int (default dict $one.autoscaling).min) (int (default dict $one.autoscaling).max)) -}}
{{- fail (printf "%s.autoscaling: min %d is above max %d" $tier (int $one.autoscaling.min) (int $one.autoscaling.max)) -}}
{{- end -}}
{{- range $field := list "region" "instance" "topology" "hop" "etcd" "fleet" "trust_domain" "admin" "state_dir" "listen" "tier" "control" "client" "picker" "tier_tls" "advertise" "report_key" "signing" -}}
{{- if hasKey $one.config $field -}}
{{- fail (printf "%s.config.%s: is written by the chart from other values; leave it out" $tier $field) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- if and $v.dns.enabled (not $v.dns.config.zones) -}}
{{- fail "dns.config.zones: is not given; name the zones that are delegated to this server (docs/operate/dns.md)" -}}
{{- end -}}
{{- if $v.anycast.enabled -}}
{{- if not $v.global.enabled -}}
{{- fail "anycast.enabled: announces this release's global balancers, and global.enabled is false" -}}
{{- end -}}
{{- if not $v.anycast.addresses -}}
{{- fail "anycast.addresses: is not given; list the addresses that the entry has in the map" -}}
{{- end -}}
{{- if not $v.anycast.config.entry -}}
{{- fail "anycast.config.entry: is not given; name the entry of the map that is announced (docs/operate/anycast.md)" -}}
{{- end -}}
{{- if not (default dict $v.anycast.config.speaker).exabgp -}}
{{- fail "anycast.config.speaker.exabgp: is not given; a BIRD of the node's own takes the systemd unit instead" -}}
{{- end -}}
{{- if hasKey (default dict $v.anycast.config.probe) "url" -}}
{{- fail "anycast.config.probe.url: is written by the chart: the global balancers of the pod's own node" -}}
{{- end -}}
{{- end -}}
{{- if ne (empty $v.admin.tokensSecret) (empty $v.admin.tokens) -}}
{{- fail "admin: give both tokensSecret and tokens, or neither" -}}
{{- end -}}
{{- if and $v.admin.scrape (not (hasKey $v.admin.tokens $v.admin.scrape)) -}}
{{- fail (printf "admin.scrape: %q is not among admin.tokens" $v.admin.scrape) -}}
{{- end -}}
{{- if and $v.admin.tokens $v.monitoring.serviceMonitor.enabled (not $v.admin.scrape) -}}
{{- fail "admin.scrape: is not given, and the admin port asks Prometheus for a token; name one of admin.tokens" -}}
{{- end -}}
{{- if and $v.engines.pool $v.engines.service -}}
{{- fail "engines: pool and service are both given; leave one of them out" -}}
{{- end -}}
{{- if and $v.regional.enabled (not (or $v.engines.pool $v.engines.service $v.regional.config.replicas $v.regional.config.discovery)) -}}
{{- fail "engines: nobody says where they are; give engines.pool, engines.service, regional.config.replicas or regional.config.discovery" -}}
{{- end -}}
{{- $a := $v.engines.autoscaling -}}
{{- if and $a.by (not (and $v.regional.enabled $a.deployment $a.model)) -}}
{{- fail "engines.autoscaling: needs the regional tier, and the Deployment and the model of engines (deployment, model)" -}}
{{- end -}}
{{- if and $a.by (gt (int $a.min) (int $a.max)) -}}
{{- fail (printf "engines.autoscaling: min %d is above max %d" (int $a.min) (int $a.max)) -}}
{{- end -}}
{{- if and (eq $a.by "keda") $v.admin.tokens (not (hasKey $v.admin.tokens $a.token)) -}}
{{- fail "engines.autoscaling.token: the admin port asks KEDA for a token; name one of admin.tokens that may read metrics" -}}
{{- end -}}
{{- if and $v.etcd.username (not $v.etcd.passwordSecret.name) -}}
{{- fail "etcd.passwordSecret.name: is not given, and etcd.username is" -}}
{{- end -}}
{{- if and $v.etcd.username (not $v.etcd.tlsSecret) -}}
{{- fail "etcd.tlsSecret: is not given, and a password never travels in plaintext; name a Secret with ca.crt" -}}
{{- end -}}
{{- if and $v.regional.enabled $v.regional.picker.enabled $v.regional.picker.tls (eq $v.tls.source "none") -}}
{{- fail "regional.picker.tls: there are no certificates with tls.source none; set it to false" -}}
{{- end -}}
{{- if and $v.regional.picker.pool (not $v.engines.podSelector.matchLabels) -}}
{{- fail "regional.picker.pool: the InferencePool needs engines.podSelector.matchLabels, which say whose pods are in it" -}}
{{- end -}}
{{- if and $v.regional.picker.pool $v.engines.pool (ne $v.regional.picker.pool $v.engines.pool) -}}
{{- fail "regional.picker.pool: is another than engines.pool, where the picker finds engines; name one" -}}
{{- end -}}
{{- if and $v.regional.picker.objectives (not $v.engines.pool) -}}
{{- fail "regional.picker.objectives: are those of an InferencePool; give engines.pool" -}}
{{- end -}}
{{- if and $v.reportKey.secret (not $v.reportKey.name) -}}
{{- fail "reportKey.name: is not given; it is the key's name under signing.keys" -}}
{{- end -}}
{{- end -}}

{{- define "farhop.listen" -}}
{{- $out := dict "host" .root.Values.listenHost "port" .port -}}
{{- if eq .root.Values.tls.source "none" -}}
{{- $_ := set $out "insecure" true -}}
{{- else -}}
{{- $folder := default "/etc/farhop/tls" .folder -}}
{{- $tls := dict "cert_file" (printf "%s/tls.crt" $folder) "key_file" (printf "%s/tls.key" $folder) -}}
{{- if .mutual -}}{{- $_ := set $tls "client_ca_file" "/etc/farhop/tls/ca.crt" -}}{{- end -}}
{{- $_ := set $out "tls" $tls -}}
{{- end -}}
{{- toYaml $out -}}
{{- end -}}

{{- define "farhop.admin" -}}
{{- $out := fromYaml (include "farhop.listen" .) -}}
{{- $tokens := dict -}}
{{- range $name, $may := .root.Values.admin.tokens -}}
{{- $_ := set $tokens $name (dict "token" (printf "file:/etc/farhop/admin/%s" $name) "may" $may) -}}
{{- end -}}
{{- if $tokens -}}{{- $_ := set $out "tokens" $tokens -}}{{- else -}}{{- $_ := set $out "insecure" true -}}{{- end -}}
{{- toYaml $out -}}
{{- end -}}

{{/* Questions are answered at once: a DNS server has nothing to drain. */}}
{{- define "farhop.drain" -}}
{{- if eq .tier "dns" }}5{{ else if eq .tier "anycast" -}}
{{- /* drain, withdraw and let that settle; four acknowledgements, and a margin of the announcer's own */ -}}
{{- $c := .root.Values.anycast.config -}}
{{- $acks := mulf 4.0 (float64 (dig "ack_s" 1.0 $c)) -}}
{{- addf 5.0 $acks (float64 (dig "drain_s" 30.0 $c)) (float64 (dig "settle_s" 2.0 $c)) | ceil | int -}}
{{- else -}}
{{- $limits := default dict (get (get .root.Values .tier).config "limits") -}}
{{- ceil (float64 (default 30 (get $limits "drain_s"))) | int -}}
{{- end -}}
{{- end -}}

{{/* An announcer drains from SIGTERM on: it must go before the balancers of its node, whose SIGTERM comes at once. */}}
{{- define "farhop.preStop" -}}
{{- if eq .tier "anycast" }}0{{ else }}{{ .root.Values.shutdown.preStopSeconds }}{{ end -}}
{{- end -}}

{{- define "farhop.grace" -}}
{{- add (include "farhop.preStop" .) (int (include "farhop.drain" .)) .root.Values.shutdown.marginSeconds -}}
{{- end -}}

{{/* A tier's configuration file. */}}
{{- define "farhop.configuration" -}}
{{- $root := .root -}}
{{- $v := $root.Values -}}
{{- $tier := .tier -}}
{{- $one := get $v $tier -}}
{{- $out := dict "region" $v.region "instance" "env:POD_NAME" "fleet" $v.fleet "trust_domain" $v.trustDomain -}}
{{- $_ := set $out "topology" "/etc/farhop/topology/world.yaml" -}}
{{- $_ := set $out "state_dir" "/var/lib/farhop" -}}
{{- $keys := dict -}}
{{- range $v.hop.keys -}}{{- $_ := set $keys . (printf "file:/etc/farhop/hop/%s" .) -}}{{- end -}}
{{- if has $tier (list "global" "regional") -}}{{- $_ := set $out "hop" (dict "keys" $keys "active" $v.hop.active) -}}{{- end -}}
{{- $etcd := dict -}}
{{- if $v.etcd.endpoints -}}{{- $_ := set $etcd "endpoints" $v.etcd.endpoints -}}{{- end -}}
{{- if $v.etcd.tlsSecret -}}
{{- $_ := set $etcd "ca_file" "/etc/farhop/etcd/ca.crt" -}}
{{- if not $v.etcd.username -}}
{{- $_ := set $etcd "cert_file" "/etc/farhop/etcd/tls.crt" -}}
{{- $_ := set $etcd "key_file" "/etc/farhop/etcd/tls.key" -}}
{{- end -}}
{{- end -}}
{{- if $v.etcd.username -}}
{{- $_ := set $etcd "username" $v.etcd.username -}}
{{- $_ := set $etcd "password" "env:ETCD_PASSWORD" -}}
{{- end -}}
{{- if $v.etcd.insecure -}}{{- $_ := set $etcd "insecure" true -}}{{- end -}}
{{- if $etcd -}}{{- $_ := set $out "etcd" $etcd -}}{{- end -}}
{{- if $v.signing -}}{{- $_ := set $out "signing" $v.signing -}}{{- end -}}
{{- $plain := eq $v.tls.source "none" -}}
{{- $files := dict "ca_file" "/etc/farhop/tls/ca.crt" "cert_file" "/etc/farhop/tls/tls.crt" "key_file" "/etc/farhop/tls/tls.key" -}}
{{- if eq $tier "global" -}}
{{- $_ := set $out "admin" (fromYaml (include "farhop.admin" (dict "root" $root "port" 8082))) -}}
{{- $folder := ternary "/etc/farhop/client-tls" "/etc/farhop/tls" (ne $v.global.clientTlsSecret "") -}}
{{- $_ := set $out "listen" (fromYaml (include "farhop.listen" (dict "root" $root "port" 8080 "folder" $folder))) -}}
{{- if $plain -}}{{- $_ := set $out "tier_insecure" true -}}{{- else -}}{{- $_ := set $out "tier_tls" $files -}}{{- end -}}
{{- else if eq $tier "dns" -}}
{{- $_ := set $out "admin" (fromYaml (include "farhop.admin" (dict "root" $root "port" 8092))) -}}
{{- $_ := set $out "listen" (dict "hosts" (list $v.listenHost) "port" 5353 "workers" (int $v.dns.workers)) -}}
{{- else if eq $tier "anycast" -}}
{{- $_ := set $out "admin" (fromYaml (include "farhop.admin" (dict "root" $root "port" 8094))) -}}
{{- $service := printf "%s-node.%s.svc" (include "farhop.name" (dict "root" $root "tier" "global")) $root.Release.Namespace -}}
{{- $probe := dict "url" (printf "%s://%s:8082/readyz" (ternary "http" "https" $plain) $service) -}}
{{- if not $plain -}}
{{- $_ := set $probe "ca_file" "/etc/farhop/tls/ca.crt" -}}
{{- $_ := set $probe "server_name" (printf "%s.global.%s" $v.region $v.trustDomain) -}}
{{- end -}}
{{- $_ := set $out "probe" $probe -}}
{{- /* Each node is a site of its own: one whose balancers are dead goes, whatever others of the entry do. */}}
{{- $_ := set $out "last_site" "withdraw" -}}
{{- else -}}
{{- $_ := set $out "admin" (fromYaml (include "farhop.admin" (dict "root" $root "port" 9002))) -}}
{{- $_ := set $out "tier" (fromYaml (include "farhop.listen" (dict "root" $root "port" 9000 "mutual" true))) -}}
{{- $_ := set $out "control" (fromYaml (include "farhop.listen" (dict "root" $root "port" 9001 "mutual" true))) -}}
{{- if $v.regional.client.enabled -}}
{{- $_ := set $out "client" (fromYaml (include "farhop.listen" (dict "root" $root "port" 8080))) -}}
{{- end -}}
{{- if $v.regional.picker.enabled -}}
{{- $picker := dict "host" $v.listenHost "port" 9003 "insecure" true -}}
{{- if $v.regional.picker.tls -}}
{{- $picker = fromYaml (include "farhop.listen" (dict "root" $root "port" 9003 "mutual" true)) -}}
{{- end -}}
{{- $_ := set $picker "callers" $v.regional.picker.callers -}}
{{- $_ := set $picker "fallbacks" (int $v.regional.picker.fallbacks) -}}
{{- $_ := set $out "picker" $picker -}}
{{- end -}}
{{- $_ := set $out "advertise" "env:POD_IP" -}}
{{- if not $plain -}}
{{- $_ := set $out "peers" (dict "tls" $files) -}}
{{- end -}}
{{- if $v.reportKey.secret -}}
{{- $_ := set $out "report_key" (dict "name" $v.reportKey.name "private" "file:/etc/farhop/report/report.pem") -}}
{{- end -}}
{{- $found := list -}}
{{- $namespace := default $root.Release.Namespace $v.engines.namespace -}}
{{- if $v.engines.pool -}}
{{- $source := dict "kind" "kubernetes" "pool" $v.engines.pool "namespace" $namespace "replica" $v.engines.replica -}}
{{- if $v.regional.picker.objectives -}}{{- $_ := set $source "objectives" $v.regional.picker.objectives -}}{{- end -}}
{{- $found = append $found $source -}}
{{- end -}}
{{- if $v.engines.service -}}
{{- $found = append $found (dict "kind" "kubernetes" "service" $v.engines.service "namespace" $namespace "replica" $v.engines.replica) -}}
{{- end -}}
{{- if $found -}}{{- $_ := set $out "discovery" (concat $found (default list $one.config.discovery)) -}}{{- end -}}
{{- end -}}
{{- range $key, $value := $one.config -}}
{{- if and (has $key (list "peers" "probe")) (hasKey $out $key) -}}
{{- $_ := set $out $key (merge (deepCopy $value) (get $out $key)) -}}
{{- else if not (and (eq $key "discovery") (hasKey $out "discovery")) -}}
{{- $_ := set $out $key $value -}}
{{- end -}}
{{- end -}}
{{- toYaml $out -}}
{{- end -}}
