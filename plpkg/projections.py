"""The names that Hugging Face's models have for the linear layers that make query, key and value."""

QKV = ("q_proj", "k_proj", "v_proj")
"""Llama's and most others'."""
PROJECTIONS = (
    QKV,
    ("qkv_proj",),  # Phi-3
    ("c_attn",),  # GPT-2
    ("query_key_value",),  # GPT-NeoX, Persimmon, Falcon, BLOOM
    ("Wqkv",),  # MPT, DBRX
    ("query", "key", "value"),  # BERT
    ("Wq", "Wk", "Wv"),  # CTRL
)
"""The names in one layer: of three, or of one that makes all three."""
