#!/usr/bin/env bash
# Trains on several hosts under Slurm, and continues the same run when a host dies or the time limit is reached:
#
#     sbatch scripts/slurm.sh my.yml steps=100000
#
# Slurm itself requeues the job after a node failure and after a preemption (--requeue). This script requeues the job
# after every other failure and at the time limit, but not after a user error (exit code 2) or scancel. It stops after
# RESTARTS restarts (an environment variable, default 20). A requeued job keeps its ID, which determines the run's name.
# Each process appends its output to a log with the number of its task.
# This script was never tried on a real cluster; docs/guides/when-a-host-dies.md lists what was tested.
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

limit='' asked=''
# 300 seconds before the time limit, Slurm sends USR1 to this shell. The shell then sends SIGTERM to the job's
# processes, which save and end.
trap 'limit=yes; scancel --signal=TERM "$SLURM_JOB_ID"' USR1
trap asked=yes TERM # from scancel; the shell still waits for its processes

# If one process dies, the others end by themselves and print the reason, so srun must not kill them at once. srun
# returns only the highest exit code. The codes 2 (a user error) and 75 (a hang) say more than those of the other
# processes, so they become 255 and 254. The inner shell traps SIGTERM, so that it still waits for its trainer.
# shellcheck disable=SC2016
srun --kill-on-bad-exit=0 --wait=300 --output=%x-%j-%t.log --open-mode=append bash -c '
  trap : TERM
  python -m trainer.train "$@"
  code=$?
  case "$code" in 2) exit 255 ;; 75) exit 254 ;; esac
  exit "$code"
' trainer "$@" run_name="job-$SLURM_JOB_ID" supervise=true &
srun=$!
while wait "$srun"; kill -0 "$srun" 2>/dev/null; do :; done # a signal to this shell ends `wait` early
wait "$srun"
code=$?
case "$code" in 255) code=2 ;; 254) code=75 ;; esac

ends() {
  echo "slurm.sh: $1; not queued again"
  exit "$2"
}
[ "$code" -ne 0 ] || exit 0
[ "$code" -ne 2 ] || ends "a user's error" 2
# In a partition with a GraceTime, Slurm announces a preemption by SIGTERM. Slurm queues the job again only if the job
# has not ended before Slurm ends it.
if [ "$code$limit" = 143 ] && [[ $(scontrol show job "$SLURM_JOB_ID") == *" PreemptTime="[0-9]* ]]; then
  echo "slurm.sh: preempted; Slurm queues the job again"
  exec sleep infinity
fi
case "$code$limit" in 130 | 143) asked=yes ;; esac
[ -z "$asked" ] || ends "somebody ended it" "$code"
[ "${SLURM_RESTART_COUNT:-0}" -lt "${RESTARTS:-20}" ] || ends "exit code $code, and all restarts are used" "$code"
echo "slurm.sh: exit code $code; queued again"
scontrol requeue "$SLURM_JOB_ID"
