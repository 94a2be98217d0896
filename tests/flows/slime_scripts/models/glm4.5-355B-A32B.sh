NLAYERS=92
FIRST_K_DENSE_REPLACE=3

layers=()
for ((i=0; i<NLAYERS; i++)); do
  if (( i < FIRST_K_DENSE_REPLACE )); then
    layers+=(0)
  else
    layers+=(1)
  fi
done

printf -v MOE_LAYER_FREQ "[%s]" "$(IFS=', '; echo "${layers[*]}")"

MODEL_ARGS=(
   --swiglu
   --disable-bias-linear
   --normalization RMSNorm
   --use-rotary-position-embeddings
   --position-embedding-type rope
   --no-position-embedding
   --num-layers 92
   --hidden-size 5120
   --ffn-hidden-size 12288
   --vocab-size 151552
   --untie-embeddings-and-output-weights
   --norm-epsilon 1e-05
   --num-attention-heads 96
   --num-query-groups 8
   --kv-channels 128
   --qk-layernorm
   --add-qkv-bias
   --rotary-base 1000000
   --rotary-percent 0.5
   --num-experts 160
   --moe-layer-freq $MOE_LAYER_FREQ
   --moe-ffn-hidden-size 1536
   --moe-shared-expert-intermediate-size 1536
   --moe-router-topk 8
   --moe-router-score-function sigmoid
   --moe-router-pre-softmax
   --moe-router-num-groups 1
   --moe-router-group-topk 1
   --moe-router-topk-scaling-factor 2.5
   --moe-router-enable-expert-bias
   --moe-router-bias-update-rate 0.0
   --group-query-attention
   --moe-grouped-gemm
   --moe-token-dispatcher-type alltoall
   --moe-token-drop-policy probs
   --moe-aux-loss-coeff 0
   --moe-router-load-balancing-type seq_aux_loss
   --moe-router-dtype fp32
   --moe-permute-fusion
   --attention-softmax-in-fp32
   --no-rope-fusion
)
