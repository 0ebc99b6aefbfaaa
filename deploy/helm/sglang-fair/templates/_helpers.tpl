{{- define "fair.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 40 | trimSuffix "-" -}}
{{- else -}}
{{- $name := default .Chart.Name .Values.nameOverride -}}
{{- if contains $name .Release.Name -}}
{{- .Release.Name | trunc 40 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name $name | trunc 40 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- /* The labels that select the pods of a component: (dict "root" $ "component" "router"). */ -}}
{{- define "fair.selector" -}}
app.kubernetes.io/name: {{ .root.Chart.Name }}
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .component }}
{{- end -}}

{{- define "fair.labels" -}}
{{ include "fair.selector" . }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
app.kubernetes.io/part-of: {{ .root.Chart.Name }}
helm.sh/chart: {{ printf "%s-%s" .root.Chart.Name .root.Chart.Version }}
{{- end -}}

{{- define "fair.metadata" -}}
name: {{ include "fair.fullname" .root }}-{{ .name | default .component }}
namespace: {{ .root.Release.Namespace }}
labels:
  {{- include "fair.labels" . | nindent 2 }}
{{- end -}}

{{- define "fair.image" -}}
{{- printf "%s:%s" .Values.image.repository (.Values.image.tag | default .Chart.AppVersion) -}}
{{- end -}}

{{- define "fair.frontImage" -}}
{{- $repository := .Values.frontImage.repository | default .Values.image.repository -}}
{{- printf "%s:%s" $repository (.Values.frontImage.tag | default .Values.image.tag | default .Chart.AppVersion) -}}
{{- end -}}

{{- /* Ports, once. kv + 1 is where KV events are replayed. */ -}}
{{- define "fair.ports" -}}
{"gateway": 8000, "admin": 8001, "dashboard": 8002, "router": 5555, "picker": 9002, "routerHttp": 9001, "replica": 30000, "kv": 5557, "replay": 5558, "load": 5559, "rendezvous": 20000}
{{- end -}}

{{- define "fair.placement" -}}
{{- .Values.settings.router.placement | default "d2lpm-queue" -}}
{{- end -}}

{{- /* "true" if the placement plans; else empty. */ -}}
{{- define "fair.plans" -}}
{{- if has (include "fair.placement" .) (list "deadline" "qlm") -}}true{{- end -}}
{{- end -}}

{{- /* "true" if the router has to know how full the replicas are. */ -}}
{{- define "fair.loads" -}}
{{- if or (include "fair.plans" .) (eq (.Values.settings.router.throttle | default "none") "oit") -}}true{{- end -}}
{{- end -}}

{{- /* "true" if replicas emulate a GPU; else empty. */ -}}
{{- define "fair.emulates" -}}
{{- if eq (.Values.settings.replica.engine | default "auto") "emulated" -}}true{{- end -}}
{{- end -}}

{{- /* As JSON: the routers' addresses. All gateways name the same ones. */ -}}
{{- define "fair.routers" -}}
{{- $ports := include "fair.ports" . | fromJson -}}
{{- $name := printf "%s-router" (include "fair.fullname" .) -}}
{{- $found := list -}}
{{- range $i := until (int .Values.router.count) -}}
{{- $found = append $found (printf "tcp://%s-%d.%s.%s.svc:%d" $name $i $name $.Release.Namespace (int $ports.router)) -}}
{{- end -}}
{{- $found | toJson -}}
{{- end -}}

{{- define "fair.replicaScheme" -}}
{{- if .Values.replicas.tls.existingSecret -}}https{{- else -}}http{{- end -}}
{{- end -}}

{{- define "fair.routerScheme" -}}
{{- if .Values.router.tls.existingSecret -}}https{{- else -}}http{{- end -}}
{{- end -}}

{{- define "fair.dashboardScheme" -}}
{{- if .Values.dashboard.tls.existingSecret -}}https{{- else -}}http{{- end -}}
{{- end -}}

{{- define "fair.gatewayScheme" -}}
{{- if .Values.gateway.tls.existingSecret -}}https{{- else -}}http{{- end -}}
{{- end -}}

{{- /* The model as a replica's --model, and as what a gateway's tokenizer is made of. */ -}}
{{- define "fair.tokenizerSource" -}}
{{- if include "fair.emulates" . -}}emulated:{{- end -}}{{ .Values.model.source }}
{{- end -}}

{{- define "fair.keysSecret" -}}
{{- .Values.keys.existingSecret | default (printf "%s-keys" (include "fair.fullname" .)) -}}
{{- end -}}

{{- /* An environment variable from the secret of keys: (list $ "SGLANG_FAIR_ADMIN_KEY" "admin-key"). */ -}}
{{- define "fair.keyVariable" -}}
- name: {{ index . 1 }}
  valueFrom:
    secretKeyRef:
      name: {{ include "fair.keysSecret" (index . 0) }}
      key: {{ index . 2 }}
{{- end -}}

{{- define "fair.hubToken" -}}
{{- if .Values.hub.existingSecret }}
- name: HF_TOKEN
  valueFrom:
    secretKeyRef:
      name: {{ .Values.hub.existingSecret }}
      key: {{ .Values.hub.key }}
{{- end }}
{{- end -}}

{{- /* Where a process may write: nothing else of its file system is writable. USER: a user without an entry in passwd. */ -}}
{{- define "fair.home" -}}
- {name: HOME, value: /cache}
- {name: USER, value: sglang-fair}
- {name: HF_HOME, value: /cache/huggingface}
- {name: SGLANG_FAIR_CACHE, value: /cache/sglang-fair}
- {name: PYTHONUNBUFFERED, value: "1"}
{{- end -}}

{{- define "fair.writable" -}}
- {name: tmp, mountPath: /tmp}
- {name: cache, mountPath: /cache}
{{- end -}}

{{- /* Settings and files, for every process. */ -}}
{{- define "fair.configMounts" -}}
- {name: config, mountPath: /etc/sglang-fair/config, readOnly: true}
{{- if .Values.files }}
- {name: files, mountPath: /etc/sglang-fair/files, readOnly: true}
{{- end }}
{{- end -}}

{{- define "fair.configVolumes" -}}
- name: config
  configMap:
    name: {{ include "fair.fullname" . }}-config
{{- if .Values.files }}
- name: files
  configMap:
    name: {{ include "fair.fullname" . }}-files
{{- end }}
{{- end -}}

{{- define "fair.emptyVolumes" -}}
- {name: tmp, emptyDir: {}}
- {name: cache, emptyDir: {}}
{{- end -}}

{{- /* The keys of ZMQ that a role needs, and no others: (list $ "gateway"). */ -}}
{{- define "fair.curveVolume" -}}
{{- $root := index . 0 -}}{{- $role := index . 1 -}}
{{- if $root.Values.curve.existingSecret }}
- name: curve
  secret:
    secretName: {{ $root.Values.curve.existingSecret }}
    defaultMode: 0440
    items:
      - {key: {{ $role }}.key_secret, path: {{ $role }}.key_secret}
      {{- if eq $role "router" }}
      - {key: gateway.key, path: gateway.key}
      - {key: replica.key, path: replica.key}
      {{- else }}
      - {key: router.key, path: router.key}
      {{- end }}
{{- end }}
{{- end -}}

{{- define "fair.curveMount" -}}
{{- if .Values.curve.existingSecret }}
- {name: curve, mountPath: /etc/sglang-fair/curve, readOnly: true}
{{- end }}
{{- end -}}

{{- /* A certificate with its key: (list "gateway-tls" SECRET). */ -}}
{{- define "fair.tlsVolume" -}}
{{- if index . 1 }}
- name: {{ index . 0 }}
  secret:
    secretName: {{ index . 1 }}
    defaultMode: 0440
    items:
      - {key: tls.crt, path: tls.crt}
      - {key: tls.key, path: tls.key}
{{- end }}
{{- end -}}

{{- /* Where `tlsVolume` is: (list "tls" SECRET). */ -}}
{{- define "fair.tlsMount" -}}
{{- if index . 1 }}
- {name: {{ index . 0 }}, mountPath: /etc/sglang-fair/tls, readOnly: true}
{{- end }}
{{- end -}}

{{- /* The arguments of whoever serves with this secret: TLS, or --insecure. */ -}}
{{- define "fair.tlsArguments" -}}
{{- if . }}
- --tls-cert=/etc/sglang-fair/tls/tls.crt
- --tls-key=/etc/sglang-fair/tls/tls.key
{{- else }}
- --insecure
{{- end }}
{{- end -}}

{{- define "fair.caVolume" -}}
{{- if .Values.ca.existingSecret }}
- name: ca
  secret:
    secretName: {{ .Values.ca.existingSecret }}
    items:
      - {key: {{ .Values.ca.key }}, path: ca.crt}
{{- end }}
{{- end -}}

{{- define "fair.caMount" -}}
{{- if .Values.ca.existingSecret }}
- {name: ca, mountPath: /etc/sglang-fair/ca, readOnly: true}
{{- end }}
{{- end -}}

{{- define "fair.modelVolume" -}}
{{- if .Values.modelVolume.existingClaim }}
- name: models
  persistentVolumeClaim:
    claimName: {{ .Values.modelVolume.existingClaim }}
    readOnly: true
{{- end }}
{{- end -}}

{{- define "fair.modelMount" -}}
{{- if .Values.modelVolume.existingClaim }}
- {name: models, mountPath: /models, readOnly: true}
{{- end }}
{{- end -}}

{{- /* What all pods have. The main process is not process 1, so that signals end it while it starts, and orphans are
reaped: (dict "root" $ "values" .Values.router "component" "router"). */ -}}
{{- define "fair.pod" -}}
{{- $values := .values -}}
automountServiceAccountToken: false
enableServiceLinks: false
shareProcessNamespace: true
{{- with .root.Values.serviceAccountName }}
serviceAccountName: {{ . }}
{{- end }}
{{- with .root.Values.image.pullSecrets }}
imagePullSecrets:
  {{- toYaml . | nindent 2 }}
{{- end }}
securityContext:
  {{- mergeOverwrite (deepCopy .root.Values.podSecurityContext) ($values.podSecurityContext | default dict) | toYaml | nindent 2 }}
{{- with $values.nodeSelector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $values.tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $values.affinity }}
affinity:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $values.priorityClassName }}
priorityClassName: {{ . }}
{{- end }}
{{- with $values.runtimeClassName }}
runtimeClassName: {{ . }}
{{- end }}
topologySpreadConstraints:
  {{- range $key := list "topology.kubernetes.io/zone" "kubernetes.io/hostname" }}
  - topologyKey: {{ $key }}
    maxSkew: 1
    whenUnsatisfiable: ScheduleAnyway
    labelSelector:
      matchLabels:
        {{- include "fair.selector" $ | nindent 8 }}
  {{- end }}
{{- end -}}

{{- /* The settings of a pod's processes, and the files that they may name. */ -}}
{{- define "fair.settingsOf" -}}
{{- $settings := .root.Values.settings -}}
{{- $sections := ternary (list "gateway" "feeder") (list .component) (eq .component "batches") -}}
{{- range $sections }}{{ get $settings . | toJson }}{{ end -}}
{{- .root.Values.files | toJson -}}
{{- end -}}

{{- define "fair.podMetadata" -}}
labels:
  {{- include "fair.labels" . | nindent 2 }}
  {{- with .values.podLabels }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
annotations:
  # A process reads its settings at its start. Those of others are none of its business.
  checksum/settings: {{ include "fair.settingsOf" . | sha256sum }}
  {{- with .values.podAnnotations }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- end -}}

{{- define "fair.containerSecurity" -}}
securityContext:
  {{- mergeOverwrite (deepCopy .root.Values.securityContext) (.values.securityContext | default dict) | toYaml | nindent 2 }}
{{- end -}}

{{- define "fair.budget" -}}
apiVersion: policy/v1
kind: PodDisruptionBudget
metadata:
  {{- include "fair.metadata" . | nindent 2 }}
spec:
  maxUnavailable: {{ .values.maxUnavailable }}
  selector:
    matchLabels:
      {{- include "fair.selector" . | nindent 6 }}
      {{- with .more }}
      {{- toYaml . | nindent 6 }}
      {{- end }}
{{- end -}}

{{- /* What gateways and pickers are told. */ -}}
{{- define "fair.frontArguments" -}}
{{- $v := .Values -}}
{{- $ports := include "fair.ports" . | fromJson -}}
- --config=/etc/sglang-fair/config/settings.yaml
- --host=0.0.0.0
- --admin-host=0.0.0.0
- --admin-port={{ $ports.admin }}
{{- range include "fair.routers" . | fromJsonArray }}
- --router={{ . }}
{{- end }}
- --model-name={{ $v.model.name }}
- --tokenizer=/tokenizers/0
{{- if $v.swap.models }}
{{- $more := list }}
{{- range $i, $one := $v.swap.models }}
{{- $more = append $more (printf "%s=/tokenizers/%d" $one.name (add1 $i)) }}
{{- end }}
- --more-models={{ join "," $more }}
{{- end }}
{{- if $v.tenants.existingSecret }}
- --tenants=/etc/sglang-fair/tenants/{{ $v.tenants.key }}
{{- end }}
{{- if $v.curve.existingSecret }}
- --keys=/etc/sglang-fair/curve
{{- end }}
{{- include "fair.tlsArguments" $v.gateway.tls.existingSecret }}
{{- if and $v.ca.existingSecret $v.replicas.tls.existingSecret }}
- --replica-ca=/etc/sglang-fair/ca/ca.crt
{{- end }}
- --notice={{ int $v.gateway.noticeSeconds }}
- --drain={{ int $v.gateway.drainSeconds }}
- --outlive-parent
{{- end -}}

{{- define "fair.frontMounts" -}}
{{- include "fair.writable" . }}
{{ include "fair.configMounts" . }}
- {name: tokenizers, mountPath: /tokenizers, readOnly: true}
{{- include "fair.curveMount" . }}
{{- include "fair.caMount" . }}
{{- if .Values.tenants.existingSecret }}
- {name: tenants, mountPath: /etc/sglang-fair/tenants, readOnly: true}
{{- end }}
{{- include "fair.tlsMount" (list "tls" .Values.gateway.tls.existingSecret) }}
{{- end -}}

{{- /* The front: the arguments of a gateway, and the tokenizers that it needs. `batches`: the one with batches. */ -}}
{{- define "fair.gatewayContainer" -}}
{{- $root := .root -}}
{{- $v := .root.Values -}}
{{- $ports := include "fair.ports" .root | fromJson -}}
{{- $scheme := include "fair.gatewayScheme" .root | upper -}}
- name: gateway
  image: {{ include "fair.frontImage" .root }}
  imagePullPolicy: {{ $v.image.pullPolicy }}
  {{- include "fair.containerSecurity" (dict "root" .root "values" $v.gateway) | nindent 2 }}
  command: [sglang-fair]
  args:
    - gateway
    - --port={{ $ports.gateway }}
    {{- include "fair.frontArguments" .root | nindent 4 }}
    {{- if .batches }}
    - --batches=/batches
    {{- end }}
  env:
    {{- include "fair.home" .root | nindent 4 }}
    {{- include "fair.keyVariable" (list $root "SGLANG_FAIR_ADMIN_KEY" "admin-key") | nindent 4 }}
    {{- include "fair.keyVariable" (list $root "SGLANG_FAIR_REPLICA_KEY" "replica-key") | nindent 4 }}
    {{- if .batches }}
    {{- include "fair.keyVariable" (list $root "SGLANG_FAIR_FEEDER_KEY" "feeder-key") | nindent 4 }}
    {{- end }}
    {{- with $v.gateway.env }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  ports:
    - {name: http, containerPort: {{ $ports.gateway }}}
    - {name: admin, containerPort: {{ $ports.admin }}}
  startupProbe:
    httpGet: {path: /healthz, port: http, scheme: {{ $scheme }}}
    periodSeconds: 2
    timeoutSeconds: 3
    failureThreshold: 90
  livenessProbe:
    httpGet: {path: /healthz, port: http, scheme: {{ $scheme }}}
    periodSeconds: 10
    timeoutSeconds: 5
    failureThreshold: 6
  readinessProbe:
    httpGet: {path: /readyz, port: http, scheme: {{ $scheme }}}
    periodSeconds: 3
    timeoutSeconds: 3
    failureThreshold: 2
  resources:
    {{- toYaml $v.gateway.resources | nindent 4 }}
  volumeMounts:
    {{- include "fair.frontMounts" .root | nindent 4 }}
    {{- if .batches }}
    - {name: batches, mountPath: /batches}
    {{- end }}
{{- end -}}

{{- /* Puts the models' tokenizers where the gateway reads them. */ -}}
{{- define "fair.tokenizers" -}}
{{- $root := . -}}
{{- $sources := list (include "fair.tokenizerSource" .) -}}
{{- range .Values.swap.models -}}{{- $sources = append $sources .source -}}{{- end -}}
{{- range $i, $source := $sources }}
- name: tokenizer-{{ $i }}
  image: {{ include "fair.frontImage" $root }}
  imagePullPolicy: {{ $root.Values.image.pullPolicy }}
  {{- include "fair.containerSecurity" (dict "root" $root "values" $root.Values.gateway) | nindent 2 }}
  command: [sglang-fair]
  args: [models, {{ $source | quote }}, --tokenizer-to=/tokenizers/{{ $i }}]
  env:
    {{- include "fair.home" $root | nindent 4 }}
    {{- include "fair.hubToken" $root | nindent 4 }}
  resources:
    requests: {cpu: 100m, memory: 256Mi}
    limits: {memory: 2Gi}
  volumeMounts:
    {{- include "fair.writable" $root | nindent 4 }}
    - {name: tokenizers, mountPath: /tokenizers}
    {{- include "fair.modelMount" $root | nindent 4 }}
{{- end }}
{{- end -}}

{{- define "fair.gatewayVolumes" -}}
{{- include "fair.emptyVolumes" . }}
{{ include "fair.configVolumes" . }}
- {name: tokenizers, emptyDir: {}}
{{- include "fair.modelVolume" . }}
{{- include "fair.curveVolume" (list . "gateway") }}
{{- include "fair.caVolume" . }}
{{- include "fair.tlsVolume" (list "tls" .Values.gateway.tls.existingSecret) }}
{{- if .Values.tenants.existingSecret }}
- name: tenants
  secret:
    secretName: {{ .Values.tenants.existingSecret }}
    defaultMode: 0440
    items:
      - {key: {{ .Values.tenants.key }}, path: {{ .Values.tenants.key }}}
{{- end }}
{{- end -}}
