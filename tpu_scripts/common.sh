# Shared by the scripts of this directory; sourced, not run. Every script has --dry-run, which prints
# the commands it would run, quoted for a shell, and runs none.
set -euo pipefail

NAME=jrl TOPOLOGY= SLICES=1 ZONE=${ZONE:-} PROJECT=${PROJECT:-} DIR=jrl DRY=
SPOT= QUEUED= GUESSED= RUNTIME= FOLLOW= LOCAL= REST=()

usage() { sed -n '2,/^$/s/^# \{0,1\}//p' "$0"; exit "${1:-0}"; }
fail() { echo "$(basename "$0"): $*" >&2; exit 2; }

# Ends unless an option, $1, has a value, $2.
value_of() { [ -n "${2:-}" ] || fail "$1 has no value; --help shows it"; }

whole_number() { [[ $2 =~ ^[1-9][0-9]*$ ]] || fail "$1 $2; write a whole number from 1"; }

# The path of CONFIG on this machine: as written, or else from the root of the checkout.
path_of() {
  local ours
  ours=$(dirname "${BASH_SOURCE[0]}")/../$1
  if [ ! -f "$1" ] && [ -f "$ours" ]; then echo "$ours"; else echo "$1"; fi
}

# The slice that [plan] of a configuration names, if it names one of one kind.
slice_of() {
  local file
  file=$(path_of "$1")
  [ ! -f "$file" ] || sed -n '/^\[plan\]/,/^\[[a-z]/s/^topology *= *"\(v[0-9a-z]*:[0-9x]*\)".*/\1/p' "$file"
}

# Options of all scripts; arguments after -- go to REST. Without --topology the slice is that of the
# configuration, or v5e:4x4.
parse() {
  options "$@"
  [ -n "$TOPOLOGY" ] || [ ${#REST[@]} = 0 ] || TOPOLOGY=$(slice_of "${REST[0]}")
  [ -n "$TOPOLOGY" ] || GUESSED=${REST[0]:-}
  TOPOLOGY=${TOPOLOGY:-v5e:4x4}
  whole_number --slices "$SLICES"
  if [ -n "$LOCAL" ]; then
    whole_number --local "$LOCAL"
  elif [[ ! $DIR =~ ^[A-Za-z0-9._][A-Za-z0-9._/-]*$ ]]; then
    # A path for a shell and for scp on other machines, which read blanks in their own ways.
    fail "--dir $DIR; write a directory below the home of the hosts, in letters, digits and . _ - /"
  fi
}

options() {
  while [ $# -gt 0 ]; do
    case $1 in
      --name) value_of "$@"; NAME=$2; shift ;;
      --topology) value_of "$@"; TOPOLOGY=$2; shift ;;
      --slices) value_of "$@"; SLICES=$2; shift ;;
      --zone) value_of "$@"; ZONE=$2; shift ;;
      --project) value_of "$@"; PROJECT=$2; shift ;;
      --dir) value_of "$@"; DIR=$2; shift ;;
      --runtime) value_of "$@"; RUNTIME=$2; shift ;;
      --local) value_of "$@"; LOCAL=$2; shift ;;
      --spot) SPOT=1 ;;
      --queued) QUEUED=1 ;;
      --follow) FOLLOW=1 ;;
      --dry-run) DRY=1 ;;
      -h | --help) usage ;;
      --) shift; REST=("$@"); return ;;
      *) fail "unknown option $1; --help lists them" ;;
    esac
    shift
  done
}

# Ends with what jrl here, if there is one, says against the configuration, before hosts are asked.
check_config() {
  local file
  file=$(path_of "$1")
  { [ -f "$file" ] && command -v "${JRL:-jrl}" > /dev/null; } || return 0
  "${JRL:-jrl}" show-config "$file" "${@:2}" > /dev/null || exit 2
}

# Ends if nothing sets run.dir: without it every start makes a new directory and begins at step 0.
# A file that only the hosts have cannot be checked here.
need_run_dir() {
  local file word
  for word in "$@"; do
    case $word in run.dir=?*) return ;; esac
  done
  file=$(path_of "$1")
  if [ -f "$file" ]; then
    [ -z "$(sed -n '/^ *\[run\]/,/^ *\[[a-z]/s/^ *dir *=/&/p; s/^ *run\.dir *=/&/p
      s/^ *run *= *{.*dir *=/&/p' "$file")" ] || return 0
  else
    case $1 in *=*) ;; *) return 0 ;; esac
  fi
  fail "run.dir is missing, so a restart would begin again at step 0; add run.dir=PATH, a directory" \
    "that all hosts share"
}

# Runs a command, or prints it as it would be typed.
run() {
  if [ -n "$DRY" ]; then printf '%q ' "$@"; echo; return; fi
  command -v "$1" > /dev/null || fail "$1 is not on PATH; install it, or see the commands with --dry-run"
  "$@"
}

need_zone() {
  [ -n "$ZONE" ] || fail "--zone is missing, such as --zone us-central2-b (or set ZONE)"
  PLACE=(--zone "$ZONE")
  [ -z "$PROJECT" ] || PLACE+=(--project "$PROJECT")
}

# Chips of a topology such as v5p:8x8x16.
chips() {
  local shape=${TOPOLOGY#*:}
  echo $((${shape//x/*}))
}

# Cloud TPU's name of the accelerator, which counts cores for v4 and v5p, chips for others.
accelerator() {
  local flat='1x1|2x2|2x4|4x4|4x8|8x8|8x16|16x16' solid='[1-9][0-9]*(x[1-9][0-9]*){2}'
  [[ $TOPOLOGY =~ ^((v5e|v6e):($flat)|(v4|v5p):$solid)$ ]] \
    || fail "topology $TOPOLOGY; write v4:SHAPE, v5e:SHAPE, v5p:SHAPE or v6e:SHAPE, such as v5e:4x4 or" \
    "v5p:4x4x8"
  [ -z "$GUESSED" ] || echo "$GUESSED names no slice: $TOPOLOGY; --topology names another" >&2
  case $TOPOLOGY in
    v4:*) echo "v4-$((2 * $(chips)))" ;;
    v5e:*) echo "v5litepod-$(chips)" ;;
    v5p:*) echo "v5p-$((2 * $(chips)))" ;;
    v6e:*) echo "v6e-$(chips)" ;;
  esac
}

runtime() {
  case ${RUNTIME:-$TOPOLOGY} in
    v4:*) echo tpu-ubuntu2204-base ;;
    v5e:*) echo v2-alpha-tpuv5-lite ;;
    v5p:*) echo v2-alpha-tpuv5 ;;
    v6e:*) echo v2-alpha-tpuv6e ;;
    *) echo "$RUNTIME" ;;
  esac
}

# The names of the slices: NAME alone, or NAME-0, NAME-1, ...
nodes() {
  if [ "$SLICES" = 1 ]; then echo "$NAME"; else seq -f "$NAME-%g" 0 $((SLICES - 1)); fi
}

# Runs a line of shell on every host of every slice; with --local N, in N directories here.
on_hosts() {
  local line=$1 node host dir
  if [ -n "$LOCAL" ]; then
    for host in $(seq 0 $((LOCAL - 1))); do
      dir=$(printf %q "$DIR/host-$host")
      run env "JRL_HOST=$host" bash -c "mkdir -p $dir; cd $dir || exit; $line"
    done
    return
  fi
  need_zone
  for node in $(nodes); do
    run gcloud compute tpus tpu-vm ssh "$node" "${PLACE[@]}" --worker=all --command="$line"
  done
}
