#!/usr/bin/env bash
# Tests and bench on this machine's GPU: run.sh [test|bench]; both without an argument. Needs a CUDA driver, and nothing else.
# MULTILORA_CUDA_DEVICE chooses the device, 0 if unset. The bench's figures go to bench.json beside this script, or into $OUT.
set -euo pipefail
cd "$(dirname "$0")"
export MULTILORA_CUDA_DEVICE="${MULTILORA_CUDA_DEVICE:-0}"
part="${1:-all}"

if [ "$part" != bench ]; then
    for program in tests/*; do
        echo "== $program"
        timeout 180 "$program" --test-threads=1
    done
    if command -v compute-sanitizer >/dev/null; then
        # Small programs: the suite itself is too long for tools that slow a kernel down a hundredfold.
        for tool in memcheck racecheck initcheck synccheck; do
            for program in graphs overlays; do
                echo "== compute-sanitizer $tool: $program"
                timeout 120 compute-sanitizer --tool "$tool" --error-exitcode 99 "tests/$program" --test-threads=1
            done
        done
    else
        echo "not run: compute-sanitizer is not on PATH"
    fi
fi
if [ "$part" != test ]; then
    echo "== bench"
    timeout 180 ./gpu_bench "${OUT:-.}/bench.json"
fi
