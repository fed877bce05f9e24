# etcd, API server, scheduler and controller manager. With a node they listen on the bridge, where Pods reach them, else on loopback.

start_control_plane() {
  local address=127.0.0.1 reconciler=none
  [ "$1" = 0 ] || address=$subnet.0.1 reconciler=lease
  api=https://$address:$port
  certificates "$address"
  users
  local client=http://127.0.0.1:$((port + 1)) peer=http://127.0.0.1:$((port + 2))
  start etcd etcd --data-dir "$D/etcd" --unsafe-no-fsync --listen-client-urls "$client" --advertise-client-urls "$client" \
    --listen-peer-urls "$peer" --initial-advertise-peer-urls "$peer" --initial-cluster "default=$peer"
  start kube-apiserver kube-apiserver --etcd-servers="$client" --bind-address="$address" --secure-port="$port" \
    --tls-cert-file="$D/certs/server.crt" --tls-private-key-file="$D/certs/server.key" \
    --kubelet-client-certificate="$D/certs/server.crt" --kubelet-client-key="$D/certs/server.key" \
    --kubelet-preferred-address-types=InternalIP --token-auth-file="$D/certs/tokens.csv" --authorization-mode=Node,RBAC \
    --service-account-issuer=https://testbed --service-account-key-file="$D/certs/accounts.pub" \
    --service-account-signing-key-file="$D/certs/accounts.key" --service-cluster-ip-range=10.0.0.0/24 \
    --advertise-address="$address" --endpoint-reconciler-type="$reconciler" --allow-privileged=true --feature-gates=ImageVolume=true
  wait_for kube-apiserver kubectl get --raw /readyz
  start kube-scheduler kube-scheduler --kubeconfig="$D/scheduler.kubeconfig" --secure-port=0 --leader-elect=false \
    --kube-api-qps=500 --kube-api-burst=1000
  # With one account for all its controllers it lacks rights, and the taint of a node that is not ready yet never leaves. The grace: it
  # hears of a node up to a minute after the API server that was away.
  start kube-controller-manager kube-controller-manager --kubeconfig="$D/manager.kubeconfig" --secure-port=0 --leader-elect=false \
    --use-service-account-credentials=true --node-monitor-grace-period=300s --service-account-private-key-file="$D/certs/accounts.key" \
    --root-ca-file="$D/certs/server.crt" --kube-api-qps=200 --flex-volume-plugin-dir="$D/volume-plugins"
  wait_for kube-controller-manager kubectl get serviceaccount default
}

# One self-signed pair serves the API and is what the kubelet knows the API server by.
certificates() {
  local names="DNS:localhost" name
  for name in kubernetes{,.default{,.svc{,.cluster.local}}}; do names+=",DNS:$name"; done
  {
    openssl req -x509 -newkey rsa:2048 -nodes -days 3650 -subj /O=system:masters/CN=testbed -keyout "$D/certs/server.key" \
      -out "$D/certs/server.crt" -addext "subjectAltName=IP:127.0.0.1,IP:$1,IP:10.0.0.1,$names"
    openssl genrsa -out "$D/certs/accounts.key" 2048
    openssl rsa -in "$D/certs/accounts.key" -pubout -out "$D/certs/accounts.pub"
  } 2>"$D/log/openssl.log"
}

# `orchard` and `orchard-watcher` may do nothing until a role says so.
users() {
  user admin admin '"system:masters"'
  user scheduler system:kube-scheduler
  user manager system:kube-controller-manager
  user node system:node:node1 '"system:nodes"'
  user orchard orchard
  user orchard-watcher orchard-watcher
}

user() {
  local file=$D/$1.kubeconfig token
  token=$(openssl rand -hex 16)
  echo "$token,$2,$2${3:+,$3}" >>"$D/certs/tokens.csv"
  cat >"$file" <<YAML
apiVersion: v1
kind: Config
clusters: [{name: testbed, cluster: {server: "$api", certificate-authority: "$D/certs/server.crt"}}]
users: [{name: $1, user: {token: $token}}]
contexts: [{name: testbed, context: {cluster: testbed, user: $1}}]
current-context: testbed
YAML
  chmod 600 "$file" "$D/certs/tokens.csv"
}
