{{/* By which the trainer reaches the router: the Service. */}}
{{- define "prelude.routerUrl" -}}
{{- $host := printf "%s.%s.svc.%s" (include "prelude.fullname" .) .Release.Namespace .Values.clusterDomain -}}
{{- default (printf "%s://%s:%d" (ternary "https" "http" (ne .Values.router.tls.secretName "")) $host (int .Values.router.service.port)) .Values.trainer.routerUrl -}}
{{- end -}}

{{/* The secret by which router, trainer and toolbox know each other. */}}
{{- define "prelude.trainerKeyMount" -}}
{{- if .Values.trainer.enabled -}}
- {name: trainer-key, mountPath: /etc/prelude/trainer-key, readOnly: true}
{{- end -}}
{{- end -}}

{{- define "prelude.trainerKeyVolume" -}}
{{- if .Values.trainer.enabled -}}
- name: trainer-key
  secret:
    secretName: {{ .Values.trainer.keySecret }}
    defaultMode: 0440
{{- end -}}
{{- end -}}
