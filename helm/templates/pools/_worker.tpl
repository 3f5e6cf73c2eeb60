{{/* The pod of a worker, as a template of pods. Takes root, role, pool and settings. */}}
{{- define "prelude.workerPod" -}}
{{- $root := .root }}
{{- $role := .role }}
{{- $pool := .pool }}
{{- $settings := .settings }}
{{- $name := include "prelude.poolName" (dict "root" $root "role" $role "pool" $pool) }}
{{- $ports := include "prelude.workerPorts" (dict "root" $root "role" $role) | fromJson }}
{{- $certified := ternary "switching" $role (eq (include "prelude.switches" (dict "root" $root "role" $role)) "true") }}
{{- $engine := merge (deepCopy $settings.engine) (default dict $root.Values.cluster.engine) }}
{{- $sharedMiB := include "prelude.sharedMemoryMiB" (dict "root" $root "role" $role "settings" $settings) | int64 }}
{{- $memory := printf "%dMi" (add $sharedMiB (mul (int64 $settings.memoryGiB) 1024)) }}
{{- $diskGiB := include "prelude.diskGiB" $root }}
{{- $holdsAdapters := include "prelude.holdsAdapters" (dict "root" $root "role" $role) }}
{{- $hasClaim := and (ne $role "decode") $settings.diskCache.persistent }}
metadata:
  labels:
    {{- with $settings.podLabels }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
    {{- include "prelude.selector" (dict "root" $root "component" $role "pool" $pool) | nindent 4 }}
    {{- with $settings.domain }}
    prelude.domain: {{ . }}
    {{- end }}
  annotations:
    checksum/config: {{ include "prelude.clusterYaml" (dict "root" $root "role" $role "settings" $settings) | sha256sum }}
    {{- if and $holdsAdapters $root.Values.integrity.trustedKeys }}
    checksum/trusted-keys: {{ toJson $root.Values.integrity.trustedKeys | sha256sum }}  # which are read once
    {{- end }}
    {{- with $settings.podAnnotations }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
spec:
  {{- include "prelude.podBasics" (dict "root" $root) | nindent 2 }}
  serviceAccountName: {{ include "prelude.fullname" $root }}-{{ $role }}
  # SIGTERM drains: no new requests, those in flight finish. Then the engine stops.
  terminationGracePeriodSeconds: {{ add $settings.drainSeconds 30 }}
  {{- if $settings.hostNetwork }}
  hostNetwork: true
  dnsPolicy: ClusterFirstWithHostNet
  {{- end }}
  {{- with $settings.runtimeClassName }}
  runtimeClassName: {{ . }}
  {{- end }}
  {{- with $settings.priorityClassName }}
  priorityClassName: {{ . }}
  {{- end }}
  {{- with $settings.nodeSelector }}
  nodeSelector:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with $settings.tolerations }}
  tolerations:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with $settings.affinity }}
  affinity:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- if $root.Values.demo.enabled }}
  {{- include "prelude.demoContainer" (dict "root" $root) | nindent 2 }}
  {{- end }}
  containers:
    - name: worker
      image: {{ include "prelude.image" (dict "root" $root "kind" "worker") }}
      imagePullPolicy: {{ $root.Values.image.worker.pullPolicy }}
      command: [tini, --, prelude]
      args: [{{ $role }}-worker, --config, /etc/prelude/cluster.yaml, --name, $(POD_NAME), --host, $(POD_IP)]
      env:
        - name: POD_NAME
          valueFrom: {fieldRef: {fieldPath: metadata.name}}
        - name: POD_IP
          valueFrom: {fieldRef: {fieldPath: status.podIP}}
        {{- include "prelude.env" $settings.env | nindent 8 }}
      {{- if and $holdsAdapters $root.Values.store.readOnlySecret }}
      envFrom: [{secretRef: {name: {{ $root.Values.store.readOnlySecret }}}}]
      {{- end }}
      ports:
        {{- range $port := keys $ports | sortAlpha }}
        - {name: {{ $port }}, containerPort: {{ index $ports $port }}}
        {{- end }}
      # Of the agent. It watches its engine, and starts it again, so an engine that is down is no reason to kill it.
      startupProbe: {httpGet: {path: /health, port: metrics}, periodSeconds: 5, failureThreshold: {{ div (add $settings.startSeconds 4) 5 }}}
      livenessProbe: {httpGet: {path: /health, port: metrics}, periodSeconds: 10, timeoutSeconds: 5, failureThreshold: 6}
      # The engine is up, one of its pairs is warm, and it is not draining.
      readinessProbe: {httpGet: {path: /ready, port: metrics}, periodSeconds: 2, timeoutSeconds: 2, failureThreshold: 3}
      resources:
        requests:
          cpu: {{ $settings.cpu | quote }}
          memory: {{ $memory }}
          ephemeral-storage: {{ if and $holdsAdapters (not $hasClaim) }}{{ $diskGiB }}Gi{{ else }}1Gi{{ end }}
        limits:
          memory: {{ $memory }}  # shared memory counts
          {{- if eq (default "cpu" $engine.device) "cuda" }}
          {{ $settings.gpuResource }}: {{ int $settings.tensorParallel }}
          {{- end }}
          {{- if $settings.rdma.enabled }}
          {{- range $resource, $count := $settings.rdma.resources }}
          {{ $resource }}: {{ $count }}
          {{- end }}
          {{- end }}
      securityContext:
        {{- include "prelude.containerSecurityContext" dict | nindent 8 }}
      volumeMounts:
        {{- include "prelude.mounts" (dict "root" $root "readOnlyStore" true) | nindent 8 }}
        - {name: shared-memory, mountPath: /dev/shm}
        {{- if $holdsAdapters }}
        - {name: cache, mountPath: /var/cache/prelude}
        {{- if $root.Values.integrity.trustedKeys }}
        - {name: trusted-keys, mountPath: /etc/prelude/trusted-keys, readOnly: true}
        {{- end }}
        {{- end }}
  volumes:
    {{- include "prelude.volumes" (dict "root" $root "configMap" $name "process" $certified "certificateName" "${POD_NAME}" "tlsSecret" $settings.tlsSecret "tmpSize" $settings.tmpSize) | nindent 4 }}
    - name: shared-memory
      emptyDir: {medium: Memory, sizeLimit: {{ $sharedMiB }}Mi}
    {{- if $holdsAdapters }}
    {{- if not $hasClaim }}
    - name: cache
      emptyDir: {sizeLimit: {{ $diskGiB }}Gi}
    {{- end }}
    {{- if $root.Values.integrity.trustedKeys }}
    - name: trusted-keys
      configMap: {name: {{ include "prelude.fullname" $root }}-trusted-keys}
    {{- end }}
    {{- end }}
{{- end -}}

{{/* GiB of a worker's disk cache. */}}
{{- define "prelude.diskGiB" -}}
{{- div (add (int64 .Values.cluster.residency.disk_bytes) 1073741823) 1073741824 -}}
{{- end -}}

{{- define "prelude.claimGiB" -}}
{{- add (include "prelude.diskGiB" . | int64) 1 -}}
{{- end -}}
