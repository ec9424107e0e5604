#!/usr/bin/env bash
# Runs on GKE as a JobSet, through XPK: one job a slice, one pod a host, restarted if one is lost.
#   gke.sh --zone ZONE --cluster CLUSTER [--project PROJECT] [--image IMAGE] [--build] [--name NAME]
#          [--topology v5p:8x8x16] [--slices N] [--delete] [--dry-run] -- CONFIG KEY=VALUE ...
# --build makes the image of tpu_scripts/Dockerfile from this checkout and pushes it; docker must be
# logged in there (gcloud auth configure-docker REGION-docker.pkg.dev). Without --image it is
# REGION-docker.pkg.dev/PROJECT/jrl/jrl:COMMIT, in the repository "jrl" of Artifact Registry.
# Without --topology the slice is the one that [plan] of CONFIG names, or v5e:4x4.
# XPK: pip install xpk. Set run.dir, here or in [run] of CONFIG, to a directory on a disk or a mounted
# bucket that all pods see, so that a restarted JobSet resumes from the newest checkpoint.

. "$(dirname "$0")/common.sh"
ROOT=$(cd "$(dirname "$0")/.." && pwd)
CLUSTER= IMAGE= BUILD= DELETE= others=()
while [ $# -gt 0 ]; do
  case $1 in
    --cluster) value_of "$@"; CLUSTER=$2; shift ;;
    --image) value_of "$@"; IMAGE=$2; shift ;;
    --build) BUILD=1 ;;
    --delete) DELETE=1 ;;
    --) others+=("$@"); break ;;
    *) others+=("$1") ;;
  esac
  shift
done
parse ${others[@]+"${others[@]}"}
need_zone
[ -n "$CLUSTER" ] || fail "--cluster is missing"
common=("--cluster=$CLUSTER" "--workload=$NAME" "${PLACE[@]}")
if [ -n "$DELETE" ]; then
  run xpk workload delete "${common[@]}"
  exit
fi
if [ -z "$IMAGE" ]; then
  [ -n "$PROJECT" ] || fail "--image is missing, and without --project there is no usual one;" \
    "write --project PROJECT --build to make REGION-docker.pkg.dev/PROJECT/jrl/jrl, or --image IMAGE"
  IMAGE=${ZONE%-*}-docker.pkg.dev/$PROJECT/jrl/jrl
  IMAGE+=:$(git -C "$ROOT" rev-parse --short=12 HEAD 2>/dev/null || echo latest)
fi
[ ${#REST[@]} -gt 0 ] || fail "nothing to run; write -- CONFIG KEY=VALUE ... at the end"
accelerator=$(accelerator)
check_config "${REST[@]}"
need_run_dir "${REST[@]}"
if [ -n "$BUILD" ]; then
  run docker build -f "$ROOT/tpu_scripts/Dockerfile" -t "$IMAGE" "$ROOT"
  run docker push "$IMAGE"
fi
line=$(printf '%q ' "${REST[@]}")
run xpk workload create "${common[@]}" "--tpu-type=$accelerator" "--num-slices=$SLICES" \
  "--docker-image=$IMAGE" --max-restarts=10 \
  "--command=JRL_DISTRIBUTED=auto jrl train ${line% }"
