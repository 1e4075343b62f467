"""A training loop of one's own, with quatrain's model and data. Run: python examples/own_loop.py"""

import tempfile

import torch
from torch.nn import functional as F

from quatrain import GPT, Loader, ModelConfig, TokenStore, generate, prepare
from quatrain.inference.config import SamplingConfig
from quatrain.tokens.config import DataConfig, PrepareConfig

STEPS, ROWS, T = 60, 8, 32

torch.manual_seed(0)
with tempfile.TemporaryDirectory() as folder:
    prepare(["corpus:sonnets"], f"{folder}/store", PrepareConfig(tokenizer="char", val_docs=(7,)))
    store = TokenStore(f"{folder}/store")
    loader = Loader(store.train, DataConfig(seq_len=T), store.eot)
    model = GPT(ModelConfig(n_layer=2, n_head=2, n_embd=64, block_size=T, vocab_size=store.vocab_size))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

    for step in range(STEPS):
        batch = loader.batch(first_row=step * ROWS, count=ROWS)  # the row number alone decides the windows
        logits = model(batch.inputs)  # (B, T, V)
        loss = F.cross_entropy(logits.flatten(0, 1), batch.targets.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 20 == 0 or step == STEPS - 1:
            print(f"step {step:>3}  loss {loss.item():.3f}")

    sample = generate(model, store.tokenizer, config=SamplingConfig(max_tokens=30))[0]
    print(f"sample: {sample.text!r}")
