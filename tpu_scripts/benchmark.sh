#!/usr/bin/env bash
# Measures 20 training steps of a configuration on a slice, beside what `jrl plan` predicts of them.
#   benchmark.sh --zone ZONE [--topology SLICE] [--name NAME] [--slices N] [--dir DIR] [--plan FILE]
#                [--dry-run] -- CONFIG KEY=VALUE ... [--steps N]
# Without --topology it is the slice that [plan] of CONFIG names, or v5e:4x4.
# The slice is created (create.sh) and has the checkout (setup.sh). Weights and prompts are random, so
# nothing else is needed. The plan is made on this machine first, into NAME-plan.json, or read from
# --plan FILE. Host 0 prints JSON and writes it to DIR/benchmark.json. With --local N, N processes on
# this machine act as hosts, for tests.

. "$(dirname "$0")/common.sh"
PLAN='' others=()
while [ $# -gt 0 ]; do
  case $1 in
    --plan) value_of "$@"; PLAN=$2; shift ;;
    --) others+=("$@"); break ;;
    *) others+=("$1") ;;
  esac
  shift
done
parse ${others[@]+"${others[@]}"}
[ ${#REST[@]} -gt 0 ] || fail "nothing to measure; write -- CONFIG KEY=VALUE ... at the end"
[ -n "$LOCAL" ] || need_zone
slice=$TOPOLOGY
[ "$SLICES" = 1 ] || slice="$SLICES*$TOPOLOGY"
if [ -z "$PLAN" ]; then
  PLAN=$NAME-plan.json changes=("$(path_of "${REST[0]}")")
  for word in "${REST[@]:1}"; do
    case $word in --steps) break ;; *) changes+=("$word") ;; esac
  done
  # It ends with 1 where the run does not fit; its figures are there all the same.
  plan=("${JRL:-jrl}" plan "${changes[@]}" --topology "$slice" --json)
  if [ -n "$DRY" ]; then
    run "${plan[@]}"
  else
    "${plan[@]}" > "$PLAN" || [ -s "$PLAN" ] || fail "jrl plan failed; see above"
  fi
fi
line=$(printf '%q ' "${REST[@]}" --topology "$slice")
started=()
# Starts a command without waiting for it, because hosts and slices wait for each other.
start() {
  if [ -n "$DRY" ]; then run "$@"; return; fi
  "$@" &
  started+=($!)
}
if [ -n "$LOCAL" ]; then
  line+=$(printf '%q ' --plan "$PLAN")
  for host in $(seq 0 $((LOCAL - 1))); do
    who=(JAX_COORDINATOR_ADDRESS=127.0.0.1:"${PORT:-8476}" JAX_NUM_PROCESSES="$LOCAL")
    start env "${who[@]}" "JAX_PROCESS_ID=$host" \
      bash -c "exec ${PYTHON:-python} -m benchmarks.tpu ${line% }"
  done
else
  line+='--plan plan.json --json benchmark.json'
  for node in $(nodes); do
    run gcloud compute tpus tpu-vm scp "$PLAN" "$node:$DIR/plan.json" "${PLACE[@]}" --worker=all
  done
  for node in $(nodes); do
    start gcloud compute tpus tpu-vm ssh "$node" "${PLACE[@]}" --worker=all \
      --command="cd \$HOME/$DIR && JRL_DISTRIBUTED=auto .venv/bin/python -m benchmarks.tpu $line"
  done
fi
code=0
for process in ${started[@]+"${started[@]}"}; do
  wait "$process" || code=$?
done
exit "$code"
