# Takes back all that a testbed put on the machine, in whatever state it is and however it ended.

# Settings of the kernel that kubelet, kube-proxy and kube-router change.
changed_settings=(kernel/panic kernel/panic_on_oops vm/overcommit_memory vm/panic_on_oom kernel/keys/root_maxkeys
  kernel/keys/root_maxbytes net/ipv4/ip_forward net/ipv4/conf/all/route_localnet net/ipv4/vs/conntrack
  net/bridge/bridge-nf-call-iptables net/bridge/bridge-nf-call-ip6tables)

# Folders outside of ours whose place cannot be chosen: of kubelet, network plugins and shims.
foreign_folders=(/var/lib/kubelet /var/log/containers /var/lib/cni /run/containerd)

remember_machine() {
  local setting folder
  for folder in "${foreign_folders[@]}"; do
    [ -e "$folder" ] || echo "$folder"
  done >"$D/made-folders"
  for setting in "${changed_settings[@]}"; do
    [ ! -r "/proc/sys/$setting" ] || echo "$setting $(cat "/proc/sys/$setting")"
  done >"$D/settings"
}

down() {
  local starter
  starter=$(cat "$D/starter" 2>/dev/null || true)
  if [ "${starter%% *}" != $$ ] && is_alive "$starter"; then kill -9 "${starter%% *}" || true; fi
  end_processes
  if [ -e "$D/settings" ]; then
    remove_mounts
    remove_network
    remove_files
    restore_settings
  fi
  [ "$(readlink "$node_holder")" != "$D" ] || rm -f "$node_holder"
  rm -rf --one-file-system "$D"
}

# Nothing here has state worth keeping, so everything is killed: first what would start something again.
end_processes() {
  local _ pid left
  for _ in $(seq 100); do
    left=$(own_processes)
    [ -n "$left" ] || return 0
    for pid in $left; do
      [ "$(basename "$(readlink "/proc/$pid/exe")")" != containerd-shim-runc-v2 ] || pkill -9 -P "$pid" || true
    done
    for pid in $left; do kill -9 "$pid" 2>/dev/null || true; done
    sleep .1
  done
  die "some processes do not end: $left"
}

restore_settings() {
  local setting value
  while read -r setting value; do
    [ ! -w "/proc/sys/$setting" ] || echo "$value" >"/proc/sys/$setting" || true
  done <"$D/settings"
}

remove_mounts() {
  awk -v folder="$D/" 'index($5, folder) == 1 {print $5}' /proc/self/mountinfo | sort -r | xargs -r umount -l
}

remove_network() {
  local version rules set
  remove_outside
  ip link del "$bridge" 2>/dev/null || true
  for version in "" 6; do
    rules=$("ip${version}tables-save" 2>/dev/null || true)
    if [[ $rules = *KUBE-* ]]; then
      grep -v -e KUBE- -e kube-router <<<"$rules" | "ip${version}tables-restore"
    fi
  done
  for set in $(ipset list -name 2>/dev/null || true); do
    [[ $set != *KUBE-* ]] || ipset destroy "$set"
  done
}

# Control groups, and what is kept in foreign folders: all of one that was not there before.
remove_files() {
  local folder
  find /sys/fs/cgroup -depth -type d -path '*/kubepods*' -exec rmdir {} + 2>/dev/null || true
  find /var/log/containers -lname "$D/*" -delete 2>/dev/null || true
  rm -f "/var/lib/cni/results/$bridge-"*
  # Sockets of shims that were killed, in a folder that another containerd may have made before us.
  sed -n 's|.*"address":"unix://\([^"]*\)".*|\1|p' "$D"/containerd-state/io.containerd.runtime.v2.task/*/*/bootstrap.json 2>/dev/null |
    xargs -r rm -f || true
  # And of those that were being started when containerd was killed, which nothing names: nobody listens there.
  find /run/containerd/s -type s -newer "$D/made-folders" 2>/dev/null | while read -r file; do
    grep -qF "$file" /proc/net/unix || rm -f "$file"
  done
  while read -r folder; do rm -rf --one-file-system "$folder"; done <"$D/made-folders"
}
