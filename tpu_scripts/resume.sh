#!/usr/bin/env bash
# Runs a command, and again when it was interrupted or died: what launch.sh starts on each host.
#   resume.sh COMMAND ...
# The end of a run (0), a mistake (1, 2), a run that stopped itself (3) and a disk that cannot be
# written (4) are final. SIGTERM is passed on and final too; stop.sh sends it. TRIES (10) runs at most.

case ${1:-} in
  "" | -h | --help) sed -n '2,/^$/s/^# \{0,1\}//p' "$0"; exit "$([ -n "${1:-}" ] && echo 0 || echo 2)" ;;
esac
child='' stopped=''
trap 'stopped=1; [ -z "$child" ] || kill -TERM "$child"' TERM INT
for try in $(seq 1 "${TRIES:-10}"); do
  "$@" &
  child=$!
  wait "$child"
  code=$?
  while kill -0 "$child" 2>/dev/null; do wait "$child"; code=$?; done # a signal ends wait early
  [ "$code" -gt 4 ] && [ -z "$stopped" ] || exit "$code"
  echo "resume.sh: ended with $code after try $try; again in ${PAUSE:-10} s" >&2
  sleep "${PAUSE:-10}" &
  child=$!
  wait "$child"
  [ -z "$stopped" ] || exit "$code"
done
exit "$code"
