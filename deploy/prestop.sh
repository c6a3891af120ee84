#!/usr/bin/env bash
# Before a pod ends: its node is drained, so that Serve starts the replicas' successors elsewhere and
# lets running streams finish, or move on. Ends when no replica is left here, or after so many seconds.
set -uo pipefail

within_s=${1:?usage: relevo-prestop SECONDS}
end=$((SECONDS + within_s))

timeout "$within_s" ray drain-node --reason DRAIN_NODE_REASON_PREEMPTION \
    --reason-message 'the pod ends' --deadline-remaining-seconds "$within_s" \
    || echo 'relevo-prestop: Ray did not take the drain; streams end with the pod and are replayed' >&2

while ((SECONDS < end)) && grep -qsa '^ray::ServeReplica' /proc/[0-9]*/cmdline; do
    sleep 1
done
