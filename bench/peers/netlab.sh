#!/bin/bash
# Several hosts on one machine: network namespaces, joined by veth pairs to a bridge that lives in a
# namespace of its own, so that nothing of this machine's network is touched. Needs root, iproute2 and
# a kernel with veth, bridge and sch_tbf.
#
#   netlab.sh create HOSTS [RAILS]   addresses 10.77.0.K of eth0, 10.78.0.K of eth1, ... on host K
#   netlab.sh shape RATE [RAIL]      such as 1gbit: both directions of every link; RAIL 0 is eth0
#   netlab.sh unshape
#   netlab.sh exec K COMMAND...      on host K, under a host name of its own
#   netlab.sh ssh [OPTIONS] HOST COMMAND   the same for mpirun; HOST is an address or a host's name
#   netlab.sh bytes K [RAIL]         sent and received by host K so far, by all rails or one
#   netlab.sh set K RAIL up|down     the interface of that rail
#   netlab.sh destroy                all of it, and every process inside; may be repeated
#
# NETLAB is the beginning of the namespaces' names, one a laboratory (default: netlab).
set -u
name=${NETLAB:-netlab}
switch=$name-switch

hosts() { ip netns list | awk '{print $1}' | grep -E "^$name-[0-9]+$" | sort -V; }

create() {
  local hosts=$1 rails=${2:-1} k rail
  destroy
  ip netns add "$switch" && ip -n "$switch" link set lo up || return 1
  for ((rail = 0; rail < rails; rail++)); do
    ip -n "$switch" link add "rail$rail" type bridge && ip -n "$switch" link set "rail$rail" up ||
      return 1
  done
  for ((k = 1; k <= hosts; k++)); do
    ip netns add "$name-$k" && ip -n "$name-$k" link set lo up || return 1
    for ((rail = 0; rail < rails; rail++)); do
      ip -n "$switch" link add "port$rail-$k" type veth peer name "eth$rail" netns "$name-$k" &&
        ip -n "$switch" link set "port$rail-$k" master "rail$rail" up &&
        ip -n "$name-$k" addr add "10.$((77 + rail)).0.$k/24" dev "eth$rail" &&
        ip -n "$name-$k" link set "eth$rail" up || return 1
    done
  done
}

# each_end RAIL COMMAND...: with the namespace and the device of both ends of every link of a rail.
each_end() {
  local rail=$1 host
  shift
  for host in $(hosts); do
    "$@" "$host" "eth$rail" && "$@" "$switch" "port$rail-${host##*-}" || return 1
  done
}
# With a burst below a few packets of 64 KiB, two opposite TCP streams reach 70 % of the rate each.
limit() { tc -n "$2" qdisc replace dev "$3" root tbf rate "$1" burst 256kb limit 1mb; }
free() { tc -n "$1" qdisc del dev "$2" root 2>/dev/null || true; }
rails() { ip -n "$switch" -o link show type bridge | wc -l; }

shape() {
  local rail
  for ((rail = 0; rail < $(rails); rail++)); do
    [ "${2:-$rail}" != "$rail" ] || each_end "$rail" limit "$1" || return 1
  done
}
unshape() {
  local rail
  for ((rail = 0; rail < $(rails); rail++)); do each_end "$rail" free; done
}

on() {
  local k=$1
  shift
  # shellcheck disable=SC2016
  exec ip netns exec "$name-$k" unshare --uts sh -c 'hostname "$0"; exec "$@"' "$name-$k" "$@"
}

bytes() {
  ip netns exec "$name-$1" sh -c "cat /sys/class/net/eth${3:-*}/statistics/$2" |
    awk '{sum += $1} END {print sum}'
}

destroy() {
  local host signal
  for signal in TERM KILL; do
    for host in $(hosts); do
      ip netns pids "$host" | xargs -r kill -"$signal" 2>/dev/null
    done
    [ -z "$(for host in $(hosts); do ip netns pids "$host"; done)" ] || sleep 0.3
  done
  for host in $(hosts) "$switch"; do
    [ ! -e "/run/netns/$host" ] || ip netns del "$host"
  done
}

case ${1:-} in
  create) create "$2" "${3:-1}" || { destroy; exit 1; } ;;
  shape) shape "$2" "${3:-}" ;;
  unshape) unshape ;;
  exec) shift; on "$@" ;;
  ssh)
    shift
    while [[ $1 == -* ]]; do
      case $1 in -l | -p | -o) shift 2 ;; *) shift ;; esac
    done
    host=$1
    shift
    host=${host##*.}
    on "${host##*-}" sh -c "$*"
    ;;
  bytes) echo "$(bytes "$2" tx_bytes "${3:-}") $(bytes "$2" rx_bytes "${3:-}")" ;;
  set) ip -n "$name-$2" link set "eth$3" "$4" ;;
  destroy) destroy ;;
  *) sed -n '2,/^set/{/^#/p}' "$0"; exit 2 ;;
esac
