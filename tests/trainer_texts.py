"""Files and launch lines of trainers, as people have them."""

from __future__ import annotations

MEGATRON_SCRIPT = """\
#!/bin/bash
export CUDA_DEVICE_MAX_CONNECTIONS=1
TP=2
GPT_MODEL_ARGS=(
    --num-layers 32 --hidden-size 4096   # Llama 3 8B
    --ffn-hidden-size 14336 --num-attention-heads 32 --group-query-attention --num-query-groups 8
    --kv-channels 128 --max-position-embeddings 8192 --position-embedding-type rope --rotary-base 500000
    --normalization RMSNorm --norm-epsilon 1e-05 --swiglu --disable-bias-linear
    --untie-embeddings-and-output-weights --hidden-dropout 0.0 --attention-dropout 0.0
    --vocab-size 128256 --make-vocab-size-divisible-by 128
)
MODEL_PARALLEL_ARGS=(
    --tensor-model-parallel-size $TP --pipeline-model-parallel-size 4 --sequence-parallel
    --use-distributed-optimizer
)
torchrun --nproc_per_node 8 pretrain_gpt.py ${GPT_MODEL_ARGS[@]} ${MODEL_PARALLEL_ARGS[@]} \\
    --seq-length 8192 --micro-batch-size 1 --global-batch-size=128 --bf16 --lr 3e-4
"""

MEGATRON_LOG = """\
------------------------ arguments ------------------------
  add_bias_linear ................................. False
  ffn_hidden_size ................................. 14336
  hidden_size ..................................... 4096
  num_layers ...................................... 32
  num_attention_heads ............................. 32
  num_query_groups ................................ 8
  kv_channels ..................................... 128
  max_position_embeddings ......................... 8192
  padded_vocab_size ............................... 128256
  position_embedding_type ......................... rope
  normalization ................................... RMSNorm
  swiglu .......................................... True
  untie_embeddings_and_output_weights ............. True
  hidden_dropout .................................. 0.0
  attention_dropout ............................... 0.0
  tensor_model_parallel_size ...................... 2
  pipeline_model_parallel_size .................... 4
  sequence_parallel ............................... True
  use_distributed_optimizer ....................... True
  world_size ...................................... 64
  seq_length ...................................... 8192
  micro_batch_size ................................ 1
  global_batch_size ............................... 128
  bf16 ............................................ True
  recompute_granularity ........................... None
-------------------- end of arguments ---------------------
"""

NEOX = """\
# a comment
{
  "pipe-parallel-size": 1, "model-parallel-size": 2, "num-layers": 32, "hidden-size": 4096,
  "intermediate_size": 32768, "num-attention-heads": 32, "max-position-embeddings": 4096, "pos-emb": "rotary",
  "no-weight-tying": true, "norm": "rmsnorm", "rms_norm_epsilon": 1.0e-5, "use_bias_in_norms": false,
  "use_bias_in_attn_linear": false, "use_bias_in_mlp": false, "activation": "swiglu", "mlp_multiple_of": 256,
  "hidden-dropout": 0, "seq-length": 4096, "train_micro_batch_size_per_gpu": 4, "bf16": {"enabled": true},
  "zero_optimization": {"stage": 1}, "optimizer": {"type": "Adam"},
}
"""

LITGPT = """\
name: pythia-6.9b
hf_config: {org: EleutherAI, name: pythia-6.9b}
block_size: 2048
n_layer: 32
n_embd: 4096
n_head: 32
vocab_size: 50254
padding_multiple: 256
"""

TITAN_FLAVORS = """\
from torchtitan.models.llama3 import TransformerModelArgs
import os; os.abort()  # never run
llama3_args = {
    "debugmodel": TransformerModelArgs(dim=256, n_layers=6, n_heads=16, rope_theta=500000),
    "8B": TransformerModelArgs(
        dim=4096, n_layers=32, n_heads=32, n_kv_heads=8, ffn_dim_multiplier=1.3, multiple_of=4 * 256, rope_theta=500000
    ),
}
"""

NANOGPT = """\
# gpt2-124M on 8 GPUs
wandb_log = True
batch_size = 12
block_size = 1024
gradient_accumulation_steps = 5 * 8
n_layer = 24
n_head = 16
n_embd = 1024
out_dir = os.path.join("out", "x")
"""

LITGPT_RUN = """\
model_name: tiny-llama-1.1b
model_config:
precision: bf16-mixed
devices: 8
train:
  global_batch_size: 512
  micro_batch_size: 4
  max_seq_length: 1024
"""

SMALL_MEGATRON = "torchrun pretrain_gpt.py --num-layers 12 --hidden-size 64 --num-attention-heads 8 --bf16"

TITAN_JOB = """\
#     "own": TransformerModelArgs(dim=64, n_layers=32, n_heads=4),

[model]
name = "llama3"
flavor = "own"
"""
