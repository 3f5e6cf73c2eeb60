{{/* cluster.yaml of one process. Takes root, and for workers role and settings (of the pool). */}}
{{- define "prelude.clusterYaml" -}}
{{- $root := .root -}}
{{- $v := $root.Values -}}
{{- $config := deepCopy $v.cluster -}}
{{- $_ := set $config "model" (mergeOverwrite (default dict $config.model) (dict "name" $v.model.name "path" $v.model.path)) -}}
{{- $router := dict "host" $v.router.listenHost "port" (int $v.ports.router.http) "drain_timeout_s" (int $v.router.drainSeconds) -}}
{{- /* Who reaches the admin listener is up to the router's NetworkPolicy. */ -}}
{{- $_ := set $router "admin" (dict "host" $v.router.listenHost "port" (int $v.ports.router.admin) "insecure" true) -}}
{{- if $v.router.tls.secretName -}}
{{- $_ := set $router "tls" (dict "certificate" "/etc/prelude/client-tls/tls.crt" "key" "/etc/prelude/client-tls/tls.key") -}}
{{- end -}}
{{- if .role -}}
{{- /* What workers do not read must not restart them. */ -}}
{{- $config = omit $config "router" "adapters" "role_changes" -}}
{{- if include "prelude.switches" . -}}{{- $_ := set $config "role_changes" "manual" -}}{{- end -}}
{{- if $v.allowPlainText -}}{{- $_ := set $config "router" (dict "insecure" true) -}}{{- end -}}
{{- else -}}
{{- if $v.allowPlainText -}}{{- $_ := set $router "insecure" true -}}{{- end -}}
{{- /* Of the Service, by which clients call in the cluster, and of what lets others in. */ -}}
{{- $service := include "prelude.fullname" $root -}}
{{- $inNamespace := printf "%s.%s" $service $root.Release.Namespace -}}
{{- $hosts := list $service $inNamespace (printf "%s.svc" $inNamespace) (printf "%s.svc.%s" $inNamespace $v.clusterDomain) -}}
{{- range $host := list $v.router.ingress.host $v.router.gateway.hostname -}}
{{- if and $host (not (hasPrefix "*" $host)) -}}{{- $hosts = append $hosts $host -}}{{- end -}}
{{- end -}}
{{- $_ := set $router "hosts" (concat (default list (default dict $config.router).hosts) $hosts | uniq) -}}
{{- $_ := set $config "router" (mergeOverwrite (default dict $config.router) $router) -}}
{{- if $v.trainer.enabled -}}
{{- $url := printf "%s://%s-trainer.%s.svc.%s:%d" (ternary "http" "https" (eq $v.tls.mode "none")) $service $root.Release.Namespace $v.clusterDomain (int $v.ports.trainer.http) -}}
{{- $_ := set $config "trainer" (dict "url" $url "folder" "/var/lib/prelude-trainer" "key" "/etc/prelude/trainer-key/trainer.key") -}}
{{- with $v.trainer.modelName -}}{{- $_ := set $config.trainer "model_name" . -}}{{- end -}}
{{- end -}}
{{- end -}}
{{- $discovery := default dict $config.discovery -}}
{{- range $each := keys (include "prelude.pools" $root | fromJson) | sortAlpha -}}
{{- $ports := include "prelude.workerPorts" (dict "root" $root "role" $each) | fromJson -}}
{{- $found := dict "dns" (printf "%s-%s.%s.svc.%s" (include "prelude.fullname" $root) $each $root.Release.Namespace $v.clusterDomain) "control_port" (int $ports.control) -}}
{{- if eq $each (default "" $.role) -}}
{{- $worker := dict "metrics_port" (int $ports.metrics) "engine_port" (int $ports.engine) "tensor_parallel" (int $.settings.tensorParallel) "drain_timeout_s" (int $.settings.drainSeconds) -}}
{{- with $ports.bootstrap -}}{{- $_ := set $worker "bootstrap_port" (int .) -}}{{- end -}}
{{- with $.settings.domain -}}{{- $_ := set $worker "domain" . -}}{{- end -}}
{{- with $.settings.engine -}}{{- $_ := set $worker "engine" . -}}{{- end -}}
{{- $_ := set $found "worker" $worker -}}
{{- end -}}
{{- $_ := set $discovery $each $found -}}
{{- end -}}
{{- $_ := set $config "discovery" $discovery -}}
{{- if eq $v.tls.mode "certManager" -}}
{{- $_ := set $config "tls" (dict "ca" "/etc/prelude/tls/ca.crt" "certificate" "/etc/prelude/tls/tls.crt" "key" "/etc/prelude/tls/tls.key") -}}
{{- else if eq $v.tls.mode "secret" -}}
{{- $_ := set $config "tls" (dict "ca" "/etc/prelude/tls/ca.crt" "certificate" "/etc/prelude/tls/{name}.crt" "key" "/etc/prelude/tls/{name}.key") -}}
{{- end -}}
{{- with $v.catalog.url -}}{{- $_ := set $config "catalog" (dict "url" .) -}}{{- end -}}
{{- $store := dict "url" $v.store.url -}}
{{- with $v.store.s3EndpointUrl -}}{{- $_ := set $store "s3_endpoint_url" . -}}{{- end -}}
{{- with $v.store.s3Region -}}{{- $_ := set $store "s3_region" . -}}{{- end -}}
{{- $_ := set $config "store" $store -}}
{{- $residency := default dict $config.residency -}}
{{- $_ := set $residency "host_bytes" (int64 (required "cluster.residency.host_bytes: give the bytes of adapters in shared memory" $residency.host_bytes)) -}}
{{- $_ := set $residency "disk_bytes" (int64 (required "cluster.residency.disk_bytes: give the bytes of adapters on disk" $residency.disk_bytes)) -}}
{{- $_ := set $residency "disk_directory" "/var/cache/prelude" -}}
{{- $_ := set $config "residency" $residency -}}
{{- if and $.role $v.integrity.trustedKeys -}}
{{- $paths := list -}}
{{- range $name := keys $v.integrity.trustedKeys | sortAlpha -}}{{- $paths = append $paths (printf "/etc/prelude/trusted-keys/%s.pem" $name) -}}{{- end -}}
{{- $_ := set $config "integrity" (mergeOverwrite (default dict $config.integrity) (dict "trusted_keys" $paths)) -}}
{{- end -}}
{{- toYaml $config -}}
{{- end -}}

{{/* MiB of a worker's /dev/shm: what its adapters may take, if its role has any, and room for its engine. */}}
{{- define "prelude.sharedMemoryMiB" -}}
{{- $adapters := ternary (div (add (int64 .root.Values.cluster.residency.host_bytes) 1048575) 1048576) 0 (eq (include "prelude.holdsAdapters" .) "true") -}}
{{- add $adapters (mul (int64 .settings.sharedMemoryGiB) 1024) -}}
{{- end -}}

{{/* A quantity of memory, and so many GiB more, in MiB. Takes memory, gib, and of, whose they are. */}}
{{- define "prelude.memoryPlus" -}}
{{- $given := toString .memory -}}
{{- if not (regexMatch "^[0-9]+(\\.[0-9]+)?[MG]i$" $given) -}}
{{- fail (printf "%s.resources: give memory in Mi or Gi, not %s: %s.sharedMemoryGiB is added to it" .of $given .of) -}}
{{- end -}}
{{- $number := trimSuffix "Gi" (trimSuffix "Mi" $given) | float64 -}}
{{- $mib := ternary (mulf $number 1024) $number (hasSuffix "Gi" $given) -}}
{{- printf "%dMi" (add (int64 (ceil $mib)) (mul (int64 .gib) 1024)) -}}
{{- end -}}
