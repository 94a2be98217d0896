NLAYERS=27
FIRST_K_DENSE_REPLACE=1

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
   --num-layers 27
   --hidden-size 2048
   --ffn-hidden-size 11264
   --vocab-size 163840
   --untie-embeddings-and-output-weights
   --norm-epsilon 1e-05
   --num-attention-heads 16
   --num-query-groups 16
   --multi-latent-attention
   --kv-lora-rank 512
   --qk-head-dim 128
   --qk-pos-emb-head-dim 64
   --v-head-dim 128
   --qk-layernorm
   --rotary-base 50000
   --rotary-percent 1.0
   --rope-type rope
   --rotary-scaling-factor 1.0
   --num-experts 64
   --moe-layer-freq $MOE_LAYER_FREQ
   --moe-ffn-hidden-size 1408
   --moe-shared-expert-intermediate-size 2816
   --moe-router-topk 6
   --moe-router-score-function sigmoid
   --moe-router-pre-softmax
   --moe-router-num-groups 1
   --moe-router-group-topk 1
   --moe-router-topk-scaling-factor 2.446
   --moe-router-enable-expert-bias
   --moe-router-bias-update-rate 0.0
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
