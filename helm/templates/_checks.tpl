{{/* What a schema cannot say. Each message names the value and the remedy. */}}
{{- define "prelude.check" -}}
{{- $v := .Values -}}
{{- $pools := include "prelude.pools" . | fromJson -}}
{{- if not $pools -}}
{{- fail "pools: give at least one of pools.unified, or one of both pools.prefill and pools.decode" -}}
{{- end -}}
{{- range $pair := list (list "prefill" "decode") (list "decode" "prefill") -}}
{{- if and (hasKey $pools (first $pair)) (not (hasKey $pools (last $pair))) -}}
{{- fail (printf "pools.%s: there is none for the pools in pools.%s" (last $pair) (first $pair)) -}}
{{- end -}}
{{- end -}}
{{- $fullname := include "prelude.fullname" . -}}
{{- if not (regexMatch "^[a-z]([-a-z0-9]*[a-z0-9])?$" $fullname) -}}
{{- fail (printf "fullnameOverride: Services would be called %s, and their names begin with a letter and have letters, digits and - only; give such a name" $fullname) -}}
{{- end -}}
{{- if not $v.model.name -}}{{- fail "model.name: give the base model's name in requests" -}}{{- end -}}
{{- if and (not $v.model.volume) (not $v.demo.enabled) -}}
{{- fail "model.volume: give the volume that has the base model, such as {persistentVolumeClaim: {claimName: models, readOnly: true}}" -}}
{{- end -}}
{{- if not (hasPrefix (printf "%s/" (trimSuffix "/" $v.model.mountPath)) (printf "%s/" $v.model.path)) -}}
{{- fail (printf "model.path: %s is not below model.mountPath, %s, where containers have the volume" $v.model.path $v.model.mountPath) -}}
{{- end -}}
{{- if not $v.store.url -}}{{- fail "store.url: give the adapter store, such as s3://bucket/prefix" -}}{{- end -}}
{{- if and (hasPrefix "file:" $v.store.url) (not $v.store.claim.enabled) -}}
{{- fail "store.url: files need store.claim.enabled" -}}
{{- end -}}
{{- if and $v.catalog.url $v.catalog.existingSecret -}}
{{- fail "catalog: give url or existingSecret, not both" -}}
{{- end -}}
{{- if $v.catalog.url -}}
{{- if not (hasPrefix "sqlite:" $v.catalog.url) -}}
{{- fail "catalog.url: is for SQLite; the URL of a PostgreSQL database has a password, so put it into a Secret and name that in catalog.existingSecret" -}}
{{- end -}}
{{- if or (gt (int $v.router.replicas) 1) $v.router.autoscaling.enabled (not $v.store.claim.enabled) -}}
{{- fail "catalog.url: SQLite is for router.replicas 1 without autoscaling, in store.claim; use PostgreSQL" -}}
{{- end -}}
{{- else if not $v.catalog.existingSecret -}}
{{- fail "catalog.existingSecret: name the Secret with the URL of the PostgreSQL database" -}}
{{- end -}}
{{- if and (eq $v.tls.mode "none") (not $v.allowPlainText) -}}
{{- fail "tls.mode: none leaves prompts and keys readable on the network; use certManager or secret, or set allowPlainText" -}}
{{- end -}}
{{- if and (eq $v.tls.mode "certManager") (not $v.tls.issuer.name) -}}
{{- fail "tls.issuer.name: name cert-manager's issuer of the cluster's certificates, a CA; or set tls.mode" -}}
{{- end -}}
{{- if eq $v.tls.mode "secret" -}}
{{- range $who := list "router" (ternary "operator" "" $v.toolbox.enabled) (ternary "trainer" "" $v.trainer.enabled) | compact -}}
{{- if not (index $v.tls.secrets $who) -}}{{- fail (printf "tls.secrets.%s: name the Secret with its certificate" $who) -}}{{- end -}}
{{- end -}}
{{- end -}}
{{- if not (or $v.router.tls.secretName $v.allowPlainText) -}}
{{- fail "router.tls.secretName: clients would use plain HTTP; name a Secret, or set allowPlainText (an ingress that ends TLS needs it)" -}}
{{- end -}}
{{- if and $v.router.tls.certManager.enabled (not (and $v.router.tls.secretName $v.tls.issuer.name (include "prelude.chosen" $v.router.tls.certManager.dnsNames | fromJsonArray))) -}}
{{- fail "router.tls.certManager: needs router.tls.secretName, tls.issuer.name and dnsNames" -}}
{{- end -}}
{{- if and $v.monitoring.podMonitor.enabled $v.networkPolicy.enabled (not $v.networkPolicy.monitoring) -}}
{{- fail "networkPolicy.monitoring: nobody could scrape what monitoring.podMonitor names; give Prometheus's pods, such as [{namespaceSelector: {matchLabels: {kubernetes.io/metadata.name: monitoring}}}]" -}}
{{- end -}}
{{- if and (not (hasKey (default dict $v.cluster.router) "auth")) (not $v.allowAnonymous) -}}
{{- fail "cluster.router.auth: without it everybody may use the router; set {}, or allowAnonymous" -}}
{{- end -}}
{{- if and $v.tests.adapter (hasKey (default dict $v.cluster.router) "auth") (not (contains "/" $v.tests.adapter)) -}}
{{- fail (printf "tests.adapter: %s has no tenant, and with cluster.router.auth every adapter has one; give TENANT/NAME" $v.tests.adapter) -}}
{{- end -}}
{{- if and $v.trainer.enabled (not $v.trainer.keySecret) -}}
{{- fail "trainer.keySecret: name the Secret whose trainer.key has 32 characters or more, by which router and trainer know each other" -}}
{{- end -}}
{{- /* Samplers reach workers as pushes, which workers beyond loopback take with a trusted signature only. */ -}}
{{- $areSigned := and $v.integrity.signingKeySecret $v.integrity.trustedKeys -}}
{{- if and $v.trainer.enabled (not (or $areSigned (default dict $v.cluster.integrity).accept_unverified)) -}}
{{- fail "integrity: workers would refuse what the trainer saves for sampling, as nobody signs it; set integrity.signingKeySecret and integrity.trustedKeys" -}}
{{- end -}}
{{- if gt (int $v.ports.kv.first) (int $v.ports.kv.last) -}}
{{- fail (printf "ports.kv: first is %d and last is %d, so there is no port between them" (int $v.ports.kv.first) (int $v.ports.kv.last)) -}}
{{- end -}}
{{- range $who := list "router" "prefill" "decode" "unified" -}}
{{- $ports := values (index $v.ports $who) -}}
{{- if ne (len $ports) (len (uniq $ports)) -}}{{- fail (printf "ports.%s: one process opens all of them, so they must differ" $who) -}}{{- end -}}
{{- end -}}
{{- if $v.router.autoscaling.enabled -}}{{- include "prelude.checkScaling" (dict "where" "router" "scaling" $v.router.autoscaling) -}}{{- end -}}
{{- range $role, $found := $pools -}}
{{- range $name, $pool := $found -}}
{{- $where := printf "pools.%s.%s" $role $name -}}
{{- if and (eq $v.tls.mode "secret") (not $pool.tlsSecret) -}}{{- fail (printf "%s.tlsSecret: name the Secret with its workers' certificates" $where) -}}{{- end -}}
{{- if and (eq $v.tls.mode "secret") (eq $pool.kind "Deployment") -}}{{- fail (printf "%s.kind: certificates of a Secret need names that are known, those of a StatefulSet" $where) -}}{{- end -}}
{{- if and $pool.diskCache.persistent (ne $role "decode") (ne $pool.kind "StatefulSet") -}}{{- fail (printf "%s.diskCache.persistent: needs kind StatefulSet" $where) -}}{{- end -}}
{{- include "prelude.checkDisk" (dict "root" $ "where" $where "role" $role "pool" $name "settings" $pool) -}}
{{- if and $pool.hostNetwork $v.networkPolicy.enabled (not $v.networkPolicy.hostNetworkNodes) -}}{{- fail (printf "networkPolicy.hostNetworkNodes: give the CIDRs of the nodes of %s, which has hostNetwork: no selector matches its pods" $where) -}}{{- end -}}
{{- if ne $pool.autoscaling.kind "none" -}}{{- include "prelude.checkScaling" (dict "where" $where "scaling" $pool.autoscaling) -}}{{- end -}}
{{- if and (eq $pool.autoscaling.kind "keda") (not $v.keda.prometheusAddress) -}}{{- fail "keda.prometheusAddress: give the URL of Prometheus" -}}{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* Takes where, and scaling with minReplicas and maxReplicas. */}}
{{- define "prelude.checkScaling" -}}
{{- if gt (int .scaling.minReplicas) (int .scaling.maxReplicas) -}}
{{- fail (printf "%s.autoscaling: minReplicas is %d, and maxReplicas %d; raise maxReplicas" .where (int .scaling.minReplicas) (int .scaling.maxReplicas)) -}}
{{- end -}}
{{- end -}}

{{/* Kubernetes changes no claims of a StatefulSet. Asks the cluster, so `helm template` does not check it.
Takes root, where, role, pool and settings. */}}
{{- define "prelude.checkDisk" -}}
{{- $name := include "prelude.poolName" (dict "root" .root "role" .role "pool" .pool) -}}
{{- $found := lookup "apps/v1" "StatefulSet" .root.Release.Namespace $name -}}
{{- if and $found (eq .settings.kind "StatefulSet") -}}
{{- $was := "" -}}
{{- range default list $found.spec.volumeClaimTemplates -}}
{{- $was = printf "a claim of %s, class %s" .spec.resources.requests.storage (toJson .spec.storageClassName) -}}
{{- end -}}
{{- $is := "" -}}
{{- if and .settings.diskCache.persistent (ne .role "decode") -}}
{{- $is = printf "a claim of %dGi, class %s" (include "prelude.claimGiB" .root | int64) (toJson .settings.diskCache.storageClassName) -}}
{{- end -}}
{{- if ne $was $is -}}
{{- fail (printf "%s.diskCache: each pod of StatefulSet %s has %s, and would have %s, which Kubernetes cannot change: first run `kubectl -n %s delete statefulset %s --cascade=orphan`, then upgrade; its pods serve on until they are replaced" .where $name (default "no claim" $was) (default "none" $is) .root.Release.Namespace $name) -}}
{{- end -}}
{{- end -}}
{{- end -}}
