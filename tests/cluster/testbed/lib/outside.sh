# What lies outside of a cluster, in a network of its own behind the node: a name server and an HTTP server at addresses that are kept
# for documentation (RFC 5737), and at the one where clouds tell a machine its secrets. Only Pods have routes there.

outside_table=7030
outside_public=(203.0.113.10 203.0.113.53 198.51.100.10)
outside_metadata=169.254.169.254

start_outside() {
  local pid address link=$bridge-out
  configured outside.Corefile >"$D/outside.Corefile"
  setsid unshare --net "$TESTBED_BIN/coredns" -conf "$D/outside.Corefile" >"$D/log/outside.log" 2>&1 </dev/null &
  pid=$!
  wait_for outside has_own_network "$pid"
  ip link add "$link" type veth peer name eth0 netns "$pid"
  # Only what is there: the rest of these networks may be somebody's, such as a package registry of a closed network.
  ip addr add 203.0.113.1/32 dev "$link"
  ip link set "$link" up
  ip route add 203.0.113.10 dev "$link"
  in_network() { nsenter --net="/proc/$pid/ns/net" ip "$@"; }
  for address in "${outside_public[@]}" "$outside_metadata"; do
    in_network addr add "$address/24" dev eth0
    ip route add "$address" via 203.0.113.10 dev "$link" table "$outside_table"
  done
  in_network link set eth0 up
  in_network link set lo up
  in_network route add default via 203.0.113.1
  ip rule add iif "$bridge" lookup "$outside_table" priority "$outside_table"
}

has_own_network() {
  [ "$(readlink "/proc/$1/exe")" = "$(realpath "$TESTBED_BIN/coredns")" ] &&
    [ "$(readlink "/proc/$1/ns/net")" != "$(readlink /proc/self/ns/net)" ]
}

remove_outside() {
  ip link del "$bridge-out" 2>/dev/null || true
  while ip rule del lookup "$outside_table" 2>/dev/null; do :; done
}
