#!/usr/bin/env bash
# All that one GPU can tell, in at most 6 minutes: correctness, then the benchmarks.
#
#   benchmarks/gpu.sh [FILE]           on a machine with a GPU; JSON lines go to FILE (default gpu.jsonl)
#   benchmarks/gpu.sh --smoke [FILE]   the same commands on the CPU with tiny sizes, to try the script itself
#
# Each part has a time limit of its own and a JSON line with its exit status and seconds; a part that fails does
# not stop those after it. The exit status is 1 if any failed.
set -uo pipefail
cd "$(dirname "$0")/.."
TOTAL_S=350
smoke=false
if [ "${1:-}" = --smoke ]; then smoke=true && shift; fi
file=${1:-gpu.jsonl}
python=${PYTHON:-.venv/bin/python}
[ -x "$(command -v "$python")" ] || python=python3
: >"$file"
failed=0

part() { # part NAME LIMIT_S COMMAND...: run, keep its JSON lines, note how it ended
    local name=$1 limit=$2 start=$SECONDS status
    shift 2
    if [ $((TOTAL_S - SECONDS)) -lt "$limit" ]; then limit=$((TOTAL_S - SECONDS)); fi
    if [ "$limit" -le 0 ]; then
        status=124
    else
        timeout -k 5 "$limit" "$@" | tee /dev/stderr | grep '^{' >>"$file"
        status=${PIPESTATUS[0]}
    fi
    [ "$status" -eq 0 ] || failed=1
    printf '{"part": "%s", "exit": %d, "seconds": %d}\n' "$name" "$status" $((SECONDS - start)) | tee -a "$file" >&2
}

if $smoke; then
    part tests 120 "$python" -m pytest -q tests/test_gpu.py
    part generator 60 "$python" benchmarks/generator.py --tokens 64 --repeats 1
    part head 60 "$python" benchmarks/head.py --tokens 16 --repeats 1
    part throughput 100 "$python" benchmarks/throughput.py --micro_batches 2 --steps 1 \
        --recipes leviathan_400m dense_tied_400m dense_untied_400m --model.vocab_size 2003 --model.hidden_size 64 \
        --model.num_layers 2 --model.num_attention_heads 4 --training.micro_batch_size 2 --data.sequence_length 64
else
    "$python" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' ||
        { echo "error: torch sees no GPU; benchmarks/gpu.sh --smoke tries the script without one" >&2; exit 2; }
    part tests 90 "$python" -m pytest -q -m gpu tests/test_gpu.py
    part generator 60 "$python" benchmarks/generator.py --device cuda
    part head-fp32 40 "$python" benchmarks/head.py
    part head-bf16 40 "$python" benchmarks/head.py --dtype bf16
    part throughput-400m 90 "$python" benchmarks/throughput.py \
        --recipes leviathan_400m dense_tied_400m dense_untied_400m
    part throughput-1200m 150 "$python" benchmarks/throughput.py \
        --recipes leviathan_1200m dense_tied_1200m dense_untied_1200m
fi
exit $failed
