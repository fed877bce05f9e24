# A node: containerd, kubelet, Services (kube-proxy), network policies (kube-router) and DNS (CoreDNS as a Pod).

make_bridge() {
  ip link add "$bridge" type bridge
  ip addr add "$subnet.0.1/16" dev "$bridge"
  ip link set "$bridge" up
}

# Fills the placeholders of a file of config/.
configured() {
  sed "s|@D@|$D|g; s|@BIN@|$TESTBED_BIN|g; s|@SOCKET@|$socket|g; s|@BRIDGE@|$bridge|g; s|@SUBNET@|$subnet|g; s|@PORT@|$((port + 3))|g" \
    "$here/config/$1"
}

start_node() {
  mkdir "$D/cni"
  configured bridge.conflist >"$D/cni/10-bridge.conflist"
  configured containerd.toml >"$D/containerd.toml"
  configured kubelet.yaml >"$D/kubelet.yaml"
  start containerd containerd -c "$D/containerd.toml"
  wait_for containerd "$TESTBED_BIN/ctr" -a "$socket" version
  import_program busybox "$(command -v busybox)" orchard.test/pause:1 '["/busybox", "sleep", "2147483647"]'
  start kubelet kubelet --config="$D/kubelet.yaml" --kubeconfig="$D/node.kubeconfig" --root-dir="$D/kubelet" --cert-dir="$D/kubelet/pki" \
    --hostname-override=node1 --node-ip="$subnet.0.1"
  wait_for kubelet node_is_ready
  start kube-proxy kube-proxy --kubeconfig="$D/admin.kubeconfig" --hostname-override=node1 --proxy-mode=iptables \
    --cluster-cidr="$subnet.0.0/16" --conntrack-max-per-core=0 --conntrack-tcp-timeout-established=0 \
    --conntrack-tcp-timeout-close-wait=0 --healthz-bind-address="127.0.0.1:$((port + 4))" --metrics-bind-address="127.0.0.1:$((port + 5))"
  NODE_NAME=node1 start kube-router kube-router --run-router=false --run-firewall=true --run-service-proxy=false \
    --run-loadbalancer=false --kubeconfig="$D/admin.kubeconfig" --master="$api" --hostname-override=node1 --health-port=0 --metrics-port=0
  import_program coredns "$TESTBED_BIN/coredns" orchard.test/coredns:1 '["/coredns"]'
  kubectl apply -f "$here/config/coredns.yaml" >/dev/null
  wait_for coredns kubectl -n kube-system wait --for=condition=Ready pod/coredns --timeout=1s
}

node_is_ready() {
  kubectl wait --for=condition=Ready node/node1 --timeout=1s && [ -z "$(kubectl get node node1 -o jsonpath='{.spec.taints}')" ]
}

import() { "$TESTBED_BIN/ctr" -a "$socket" -n k8s.io images import "$1" >/dev/null; }

# Makes an image of one static program and loads it.
import_program() {
  local root=$D/image
  mkdir "$root"
  cp "$2" "$root/$1"
  "$here/oci-image" "$D/image.tar" "$3" "$root" --entrypoint "$4"
  import "$D/image.tar"
  rm -r "$root" "$D/image.tar"
}
