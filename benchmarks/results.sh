#!/usr/bin/env bash
# A full comparison: our demo suite and 120 questions of Spec-Bench, every drafter and the
# peers, at the demo model's own cost (SIZE "small") and at that of a larger one (SIZE "1B").
#
#   QUESTIONS=question.jsonl INSTRUCTIONS=instructions.jsonl benchmarks/results.sh small build/results
#   QUESTIONS=question.jsonl INSTRUCTIONS=instructions.jsonl benchmarks/results.sh 1B build/results
#
# QUESTIONS     Spec-Bench's question.jsonl
# INSTRUCTIONS  lines of {"prompt": ...} unlike the questions; the model's answers to them are the corpus of `rest` and
#               `sam,corpus=`, as a server's log would be
# VLLM_PYTHON   the interpreter of an environment with vLLM; without it vLLM's peers are listed as missing
#
# It wants the drafters of the demo model in models/ (demo-draft with a vocabulary, demo-sorted, demo-kangaroo). A run
# that was stopped goes on with the same command.
set -euo pipefail

size=$1 out=$2
paceline=${PACELINE:-.venv/bin/paceline}
draft=models/demo-draft
own=$out/own

if [ ! -e "$own/store.json" ]; then
    mkdir -p "$out"
    "$paceline" generate models/demo --prompts "$INSTRUCTIONS" --draft recycling,tree=16 --batch 16 --json > "$out/own.jsonl"
    "$paceline" corpus build "$own" --text "$out/own.jsonl" --tokenizer models/demo
fi

methods=(
    -d prompt-lookup -d sam -d suffix -d hierarchy -d recycling,tree=16 -d ngram-pool,window=0
    -d blend,nodes=16 -d rest:"$own" -d sam+recycling,tree=16
    -d model:$draft -d sam+model:$draft -d s2d:models/demo-sorted -d kangaroo:models/demo-kangaroo
    --peer transformers --peer transformers-lookup --peer transformers-assisted:$draft --peer transformers-early-exit
    --peer vllm --peer vllm-ngram --peer vllm-draft:$draft
)
[ -z "${VLLM_PYTHON:-}" ] || methods+=(--peer-python "$VLLM_PYTHON")

# Where a forward takes long, answers are shorter and variants fewer.
if [ "$size" = small ]; then
    methods+=(-n 128 -d recycling -d sam,corpus="$own" -d model:$draft,vocab=2048 -d model:$draft,stop=fixed,draft=3)
    methods+=(-d model:$draft,stop=adaptive -d s2d:models/demo-sorted,thresholds=0.5)
else
    methods+=(-n 32 --as-large "$size")
fi

"$paceline" bench models/demo "${methods[@]}" --suite demo --out "$out/demo-$size"
"$paceline" bench models/demo "${methods[@]}" --suite "$QUESTIONS" --limit 120 --out "$out/spec-bench-$size"
