"""Tiny causal language models of Hugging Face: by family its model type and what is not the default there."""

SIZES = dict(vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4)
SIZES |= dict(max_position_embeddings=64, pad_token_id=0, bos_token_id=1, eos_token_id=2)
GROUPED = SIZES | dict(num_key_value_heads=2)
EXPERTS = GROUPED | dict(num_experts_per_tok=2, experts_implementation="batched_mm")

CAUSAL = {
    "Llama": ("llama", GROUPED),
    "Llama 4": ("llama4_text", EXPERTS | dict(num_local_experts=2, intermediate_size_mlp=48, head_dim=8)),
    "Mistral": ("mistral", GROUPED),
    "Mixtral": ("mixtral", EXPERTS | dict(num_local_experts=4)),
    "Qwen 2": ("qwen2", GROUPED),
    "Qwen 3": ("qwen3", GROUPED | dict(head_dim=8)),
    "Qwen 3, experts": ("qwen3_moe", EXPERTS | dict(num_experts=4, moe_intermediate_size=24, head_dim=8)),
    "Gemma": ("gemma", GROUPED | dict(head_dim=8)),
    "Gemma 2": ("gemma2", GROUPED | dict(head_dim=8)),
    "Gemma 3": ("gemma3_text", GROUPED | dict(head_dim=8)),
    "Phi": ("phi", SIZES),
    "Phi 3": ("phi3", GROUPED),
    "OLMo 2": ("olmo2", GROUPED),
    "SmolLM 3": ("smollm3", GROUPED),
    "Granite": ("granite", GROUPED),
    "Cohere": ("cohere", GROUPED),
    "StarCoder 2": ("starcoder2", GROUPED),
    "StableLM": ("stablelm", GROUPED),
    "Falcon": ("falcon", SIZES | dict(new_decoder_architecture=True, num_kv_heads=2)),
    "GPT-2": ("gpt2", dict(vocab_size=64, n_embd=32, n_layer=2, n_head=4, n_positions=64)),
    "GPT-J": ("gptj", dict(vocab_size=64, n_embd=32, n_layer=2, n_head=4, n_positions=64, rotary_dim=4)),
    "GPT-NeoX": ("gpt_neox", SIZES),
    "GPT-OSS": ("gpt_oss", GROUPED | dict(num_local_experts=4, num_experts_per_tok=2, head_dim=8)),
    "OPT": ("opt", SIZES | dict(ffn_dim=48, word_embed_proj_dim=32)),
    "BLOOM": ("bloom", dict(vocab_size=64, hidden_size=32, n_layer=2, n_head=4)),
    "DeepSeek 3": (
        "deepseek_v3",
        EXPERTS
        | dict(moe_intermediate_size=24, n_routed_experts=4, n_group=1, topk_group=1, first_k_dense_replace=1)
        | dict(q_lora_rank=8, kv_lora_rank=8, qk_rope_head_dim=4, qk_nope_head_dim=4, v_head_dim=8),
    ),
    "Mamba": ("mamba", dict(vocab_size=64, hidden_size=32, num_hidden_layers=2, state_size=4)),
    "RecurrentGemma": ("recurrent_gemma", GROUPED | dict(lru_width=32, num_hidden_layers=3)),
    "XLNet": ("xlnet", dict(vocab_size=64, d_model=32, n_layer=2, n_head=4, d_inner=48)),
}
