#!/usr/bin/env bash
# Everything that needs an accelerator, in one command, meant to take less than 8 minutes on one device (never run):
#   tests/gpu/check.sh                        writes runs/gpu-check/{calibration.json,tasks.csv,check.log}
#   tests/gpu/check.sh --device cpu --quick   shows on a CPU, in a minute, that this script works
# Needs no installation and no network: torch, numpy, scipy, transformers and pytest beside the sources.
set -euo pipefail
cd "$(dirname "$0")/../.."
if [[ " $* " =~ " --device"[=\ ]"cpu " ]]; then export CUDA_VISIBLE_DEVICES=""; fi
PYTHONPATH="$PWD/src:$PWD${PYTHONPATH:+:$PYTHONPATH}" exec "${PYTHON:-python3}" -m tests.gpu.check "$@"
