#!/usr/bin/env bash
# Shows the end of the training log, of host 0 of the first slice, or of all local processes.
#   logs.sh --zone ZONE [--name NAME] [--slices N] [--dir DIR] [--follow] [--dry-run]

. "$(dirname "$0")/common.sh"
parse "$@"
tail="tail -n 40 ${FOLLOW:+-f }train.log"
if [ -n "$LOCAL" ]; then
  on_hosts "$tail"
else
  need_zone
  first=$(nodes | head -n 1)
  run gcloud compute tpus tpu-vm ssh "$first" "${PLACE[@]}" --worker=0 \
    --command="cd \$HOME/$DIR || exit; $tail"
fi
