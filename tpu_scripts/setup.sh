#!/usr/bin/env bash
# Copies this checkout to every host and installs it there (install.sh), in ~/DIR (jrl when not set).
#   setup.sh --zone ZONE [--name NAME] [--slices N] [--dir DIR] [--dry-run]
# The copy is what git tracks at HEAD: what is not committed stays behind.

. "$(dirname "$0")/common.sh"
parse "$@"
need_zone
root=$(cd "$(dirname "$0")/.." && pwd)
archive=${TMPDIR:-/tmp}/$NAME-source.tar.gz
run git -C "$root" archive --format=tar.gz -o "$archive" HEAD
for node in $(nodes); do
  run gcloud compute tpus tpu-vm scp "$archive" "$node:source.tar.gz" "${PLACE[@]}" --worker=all
done
on_hosts "mkdir -p $DIR && tar -xzf source.tar.gz -C $DIR && cd $DIR && tpu_scripts/install.sh"
