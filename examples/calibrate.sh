#!/bin/sh
# FP8 scales from a folder of images like those that will be served. FP8 attention needs
# no such file; with one, the scales are the same for every batch. On a GPU it takes
# minutes; without one it runs, too, but slowly.
#
#   sh examples/calibrate.sh IMAGES CHECKPOINT_FOLDER [OPTION...]
#
# Options are those of `vllm-flashinfer-vit calibrate`. The scales are written to
# fp8_scales.json, or to the file that the variable SCALES names.
set -eu

if [ $# -lt 2 ]; then
    echo "usage: sh $0 IMAGES CHECKPOINT_FOLDER [OPTION...]" >&2
    exit 2
fi
images=$1
model=$2
shift 2
scales=${SCALES:-fp8_scales.json}

vllm-flashinfer-vit calibrate "$images" --model "$model" --output "$scales" "$@"

echo "To serve with these scales:"
echo "sh examples/serve.sh '$model' --mm-encoder-attn-dtype fp8 \\"
echo "    --mm-encoder-fp8-scale-path '$scales'"
