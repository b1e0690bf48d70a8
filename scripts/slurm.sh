#!/usr/bin/env bash
# Trains on several hosts under Slurm, and continues the same run when a host dies or the time is up:
#
#     sbatch scripts/slurm.sh my.yml steps=100000
#
# Slurm itself queues the job again after the failure of a node and after a preemption (--requeue). This script does so
# after every other failure and at the time limit, but not after a user's error (exit code 2), not after scancel, and at
# most RESTARTS times. The number of the job stays the same, and with it the name of the run.
# docs/guides/when-a-host-dies.md says what was tried: not a real cluster.
#SBATCH --job-name=trainer
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --time=24:00:00
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=%x-%j.log
#SBATCH --signal=B:USR1@300
set -uo pipefail

export USER_ERROR="$SLURM_SUBMIT_DIR/user-error-$SLURM_JOB_ID-${SLURM_RESTART_COUNT:-0}" # of this start
limit=
# 300 seconds before the time limit Slurm signals this shell, which asks the processes to save and end.
trap 'limit=yes; scancel --signal=TERM "$SLURM_JOB_ID"' USR1

rm -f "$USER_ERROR"
# A process whose neighbour died ends by itself and says why, so srun does not end it at once. srun returns the highest
# code of all; a process with code 2 therefore leaves a file. The inner shell waits for its trainer after SIGTERM.
srun --kill-on-bad-exit=0 --wait=300 bash -c '
  trap : TERM
  python -m trainer.train "$@"
  code=$?
  [ "$code" -ne 2 ] || : > "$USER_ERROR"
  exit "$code"
' trainer "$@" run_name="job-$SLURM_JOB_ID" supervise=true &
srun=$!
while wait "$srun"; code=$?; kill -0 "$srun" 2>/dev/null; do :; done # a signal to this shell ends `wait` early

ends() {
  echo "slurm.sh: $1; not queued again"
  exit "$2"
}
[ "$code" -ne 0 ] || exit 0
[ ! -e "$USER_ERROR" ] || ends "a user's error" 2
case "$code$limit" in 130 | 143) ends "somebody ended it" "$code" ;; esac
[ "${SLURM_RESTART_COUNT:-0}" -lt "${RESTARTS:-20}" ] || ends "exit code $code, and all restarts are used" "$code"
echo "slurm.sh: exit code $code; queued again"
scontrol requeue "$SLURM_JOB_ID"
