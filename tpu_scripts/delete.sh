#!/usr/bin/env bash
# Deletes the slices and everything on their disks; checkpoints elsewhere stay.
#   delete.sh --zone ZONE [--name NAME] [--slices N] [--queued] [--dry-run]
# Give --queued and --slices as create.sh was given them.

. "$(dirname "$0")/common.sh"
parse "$@"
need_zone
if [ -n "$QUEUED" ] || [ "$SLICES" -gt 1 ]; then
  run gcloud compute tpus queued-resources delete "$NAME" "${PLACE[@]}" --force --quiet
else
  run gcloud compute tpus tpu-vm delete "$NAME" "${PLACE[@]}" --quiet
fi
