# Processes of a testbed. Whatever it runs is one of $TESTBED_BIN with its folder in the arguments, so nothing is kept in pid files and
# also what a killed run left behind is found.

start() {
  local log=$1
  shift
  PATH=$TESTBED_BIN:$PATH setsid "$TESTBED_BIN/$1" "${@:2}" >"$D/log/$log.log" 2>&1 </dev/null &
}

wait_for() {
  local what=$1 _
  shift
  for _ in $(seq 600); do
    "$@" >/dev/null 2>&1 && return
    sleep .1
  done
  echo "testbed: $what is not ready after a minute. The end of its log:" >&2
  tail -n 20 "$D/log/$what.log" >&2 2>/dev/null || true
  return 1
}

kubectl() { "$TESTBED_BIN/kubectl" --kubeconfig "$D/admin.kubeconfig" "$@"; }

# Pids of all processes of this testbed, its containers left out.
own_processes() {
  local folder
  for folder in /proc/[0-9]*; do
    [[ "$(readlink "$folder/exe" 2>/dev/null)" = "$TESTBED_BIN"/* ]] || continue
    tr '\0' '\n' <"$folder/cmdline" 2>/dev/null | grep -qF "$D" && echo "${folder#/proc/}"
  done
  return 0
}

# A process and the time of its start, so that a number used again is not taken for it.
owner_of() {
  local stat
  [ -n "$1" ] || return 0
  stat=$(cat "/proc/$1/stat" 2>/dev/null) || return 0
  stat=${stat##*) }
  # shellcheck disable=SC2086
  set -- "$1" $stat
  echo "$1 ${21}"
}

is_alive() { [ -n "$1" ] && [ "$(owner_of "${1%% *}")" = "$1" ]; }
