# Every testbed has a slot of its own: a folder, ten ports, a bridge, a subnet. So many can run at once, but one node only: the rules
# that kube-proxy and kube-router write are the machine's.

parent=${TESTBED_PARENT:-/tmp}
name=orchard-testbed
node_holder=$parent/$name-node # a link to the folder of the testbed that has the node

use_slot() {
  D=$parent/$name-$1 port=$((16000 + 10 * $1)) bridge=orchard$1 subnet=10.$((88 + $1)) socket=$parent/$name-$1/containerd.sock
}

use_folder() {
  [ -n "$1" ] || die "TESTBED_DIR is not set: \`cluster up\` prints it, \`cluster list\` names those there are"
  [[ $1 =~ ^"$parent/$name-"([0-9]{1,2})$ ]] || die "TESTBED_DIR: $1 is not a folder that \`cluster up\` made"
  use_slot "${BASH_REMATCH[1]}"
}

list() {
  local folder
  for folder in "$parent/$name"-[0-9]*; do [ ! -d "$folder" ] || echo "$folder"; done
}

# Runs a function while no other `cluster` of this user claims or sweeps.
alone() {
  (
    flock 8
    "$@"
  ) 8>>"$TESTBED_BIN/.slots.lock"
}

# Claims the first free slot, or TESTBED_SLOT; prints its folder. Making the folder is the claim.
claim_slot() {
  local slot
  sweep
  for slot in ${TESTBED_SLOT:-$(seq 0 49)}; do
    use_slot "$slot"
    [ -z "$(ss -Hltn "sport >= :$port and sport < :$((port + 10))")" ] && mkdir -m 711 "$D" 2>/dev/null || continue
    owner_of $$ >"$D/starter"
    owner_of "${TESTBED_OWNER:-}" >"$D/owner"
    echo "$D"
    return
  done
  die "no slot is free; these are taken: $(list | tr '\n' ' ')"
}

# Ends the testbeds whose owner has died without doing so. Those without an owner are somebody's who works with them by hand.
sweep() {
  local folder owner
  for folder in $(list); do
    [ -O "$folder" ] || continue
    owner=$(cat "$folder/owner" 2>/dev/null || echo none)
    [ -n "$owner" ] && ! is_alive "$owner" || continue
    echo "testbed: ending $folder, whose owner has died" >&2
    (use_folder "$folder" && down)
  done
  [ -e "$node_holder" ] || rm -f "$node_holder"
}

# Waits, at most TESTBED_WAIT seconds, until no other testbed has a node.
take_node() {
  local said="" deadline=$((SECONDS + ${TESTBED_WAIT:-1800}))
  until alone claim_node; do
    [ -n "$said" ] || echo "testbed: waiting for the node that $(readlink "$node_holder") has" >&2
    said=1
    [ "$SECONDS" -lt "$deadline" ] || die "$(readlink "$node_holder") still has the node; end it: TESTBED_DIR=... $here/cluster down"
    sleep 1
  done
}

claim_node() {
  sweep
  ln -s "$D" "$node_holder" 2>/dev/null
}
