{{/* Of every container. */}}
{{- define "prelude.containerSecurityContext" -}}
allowPrivilegeEscalation: false
privileged: false
readOnlyRootFilesystem: true
capabilities:
  drop: [ALL]
{{- end -}}

{{/* Of every pod. Takes root. */}}
{{- define "prelude.podBasics" -}}
automountServiceAccountToken: false
enableServiceLinks: false
securityContext:
  {{- toYaml .root.Values.podSecurityContext | nindent 2 }}
{{- with include "prelude.chosen" .root.Values.image.pullSecrets | fromJsonArray }}
imagePullSecrets:
  {{- range . }}
  - name: {{ . | quote }}
  {{- end }}
{{- end }}
{{- end -}}

{{/* Volumes of every process. Takes root, configMap, process (role in its certificate), certificateName, tlsSecret
and tmpSize. */}}
{{- define "prelude.volumes" -}}
{{- $v := .root.Values -}}
- name: config
  configMap:
    name: {{ .configMap }}
- name: tmp
  emptyDir:
    sizeLimit: {{ .tmpSize }}
- name: model
  {{- if $v.demo.enabled }}
  emptyDir:
    sizeLimit: 1Gi
  {{- else }}
  {{- toYaml $v.model.volume | nindent 2 }}
  {{- end }}
{{- if $v.store.claim.enabled }}
- name: store
  persistentVolumeClaim:
    claimName: {{ default (printf "%s-store" (include "prelude.fullname" .root)) $v.store.claim.existingClaim }}
{{- end }}
{{- if eq $v.tls.mode "certManager" }}
- name: tls
  csi:
    driver: csi.cert-manager.io
    readOnly: true
    volumeAttributes:
      csi.cert-manager.io/issuer-name: {{ $v.tls.issuer.name }}
      csi.cert-manager.io/issuer-kind: {{ $v.tls.issuer.kind }}
      csi.cert-manager.io/issuer-group: {{ $v.tls.issuer.group }}
      csi.cert-manager.io/uri-sans: spiffe://{{ $v.tls.trustDomain }}/{{ .process }}/{{ .certificateName }}
      csi.cert-manager.io/dns-names: {{ .certificateName }}.{{ .process }}.{{ $v.tls.trustDomain }}
      csi.cert-manager.io/key-usages: digital signature,key encipherment,server auth,client auth
      csi.cert-manager.io/duration: {{ $v.tls.duration }}
      csi.cert-manager.io/fs-group: {{ $v.podSecurityContext.fsGroup | quote }}
{{- else if eq $v.tls.mode "secret" }}
- name: tls
  secret:
    secretName: {{ .tlsSecret }}
    defaultMode: 0440
{{- end }}
{{- end -}}

{{- define "prelude.mounts" -}}
{{- $v := .root.Values -}}
- {name: config, mountPath: /etc/prelude/cluster.yaml, subPath: cluster.yaml, readOnly: true}
- {name: tmp, mountPath: /tmp}
- {name: model, mountPath: {{ $v.model.mountPath }}, readOnly: true}
{{- if $v.store.claim.enabled }}
- {name: store, mountPath: /var/lib/prelude{{ if .readOnlyStore }}, readOnly: true{{ end }}}
{{- end }}
{{- if ne $v.tls.mode "none" }}
- {name: tls, mountPath: /etc/prelude/tls, readOnly: true}
{{- end }}
{{- end -}}

{{/* The catalog and what signs adapters, of routers and the toolbox. */}}
{{- define "prelude.catalogEnv" -}}
{{- with .Values.catalog.existingSecret }}
- name: PRELUDE_CATALOG_URL
  valueFrom: {secretKeyRef: {name: {{ . }}, key: {{ $.Values.catalog.key }}}}
{{- end }}
{{- end -}}

{{- define "prelude.signingEnv" -}}
{{- with .Values.integrity.signingKeySecret }}
- name: PRELUDE_SIGNING_KEY
  valueFrom: {secretKeyRef: {name: {{ . }}, key: {{ $.Values.integrity.signingKey }}}}
{{- end }}
{{- end -}}

{{/* Variables by name. Helm has numbers as floats: `quote` alone would make 8388608 "8.388608e+06". */}}
{{- define "prelude.env" -}}
{{- range $name, $value := merge (deepCopy .) (dict "HOME" "/tmp") }}
- {name: {{ $name }}, value: {{ ternary $value (toJson $value) (kindIs "string" $value) | quote }}}
{{- end }}
{{- end -}}

{{/* Makes the demo's model. Takes root. */}}
{{- define "prelude.demoContainer" -}}
initContainers:
  - name: demo
    image: {{ include "prelude.image" (dict "root" .root "kind" "worker") }}
    imagePullPolicy: {{ .root.Values.image.worker.pullPolicy }}
    command: [prelude, demo, --toy, {{ dir .root.Values.model.path }}]
    env: [{name: HOME, value: /tmp}]
    resources: {requests: {cpu: 250m, memory: 1Gi}, limits: {memory: 2Gi}}
    securityContext:
      {{- include "prelude.containerSecurityContext" dict | nindent 6 }}
    volumeMounts:
      - {name: model, mountPath: {{ .root.Values.model.mountPath }}}
      - {name: tmp, mountPath: /tmp}
{{- end -}}
