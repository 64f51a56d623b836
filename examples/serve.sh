#!/bin/sh
# vLLM's server with this package and encoder CUDA graphs. Needs a GPU.
#
#   sh examples/serve.sh [MODEL [OPTION...]]
#
# Options are those of `vllm serve`. FP8 attention for long sequences:
#
#   sh examples/serve.sh Qwen/Qwen3-VL-8B-Instruct --mm-encoder-attn-dtype fp8
#
# With vLLM 0.25.1 to 0.27.1 put VLLM_USE_V2_MODEL_RUNNER=0 in front: the newer runner
# of these releases has no encoder graphs.
set -eu

model=${1:-Qwen/Qwen3-VL-8B-Instruct}
[ $# -eq 0 ] || shift

exec vllm serve "$model" \
    --mm-encoder-attn-backend FLASHINFER \
    --compilation-config '{"cudagraph_mm_encoder": true}' \
    "$@"
