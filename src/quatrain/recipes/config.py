"""A whole run: the parts' own configs put together, and what must fit between them."""

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass, field

from quatrain.errors import ConfigError
from quatrain.model.config import ModelConfig
from quatrain.settings import Settings, option
from quatrain.tokens.config import DataConfig
from quatrain.training.config import OptimConfig, TrainConfig, batch_mistakes

SECTIONS: dict[str, type[Settings]] = {
    "model": ModelConfig,
    "optim": OptimConfig,
    "data": DataConfig,
    "train": TrainConfig,
}


@dataclass(frozen=True)
class RunConfig(Settings):
    """The sections of a recipe; `device` stands above them."""

    device: str = option("auto", "auto, cpu, cuda, cuda:N or mps; auto: cuda, then mps, then cpu")
    model: ModelConfig = field(default_factory=ModelConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    data: DataConfig = field(default_factory=DataConfig)
    train: TrainConfig = field(default_factory=TrainConfig)

    def mistakes(self) -> Iterator[str]:
        """Sentences about settings that are right alone and wrong together."""
        if self.data.seq_len > self.model.block_size:
            limit = self.model.block_size
            yield f"data.seq_len {self.data.seq_len} is above model.block_size {limit}; lower it or raise that"
        yield from batch_mistakes(self.train, self.data.seq_len)
        scheduled = self.optim.warmup + self.optim.cooldown
        if scheduled > self.train.steps:
            yield f"optim.warmup + optim.cooldown is {scheduled}, above train.steps {self.train.steps}"

    def for_vocabulary(self, size: int) -> "RunConfig":
        """A copy for a store whose tokenizer has so many ids; raises `ConfigError` where another number is set."""
        if self.model.vocab_size not in (0, size):
            raise ConfigError(
                [
                    f"model.vocab_size is {self.model.vocab_size}, the store's tokenizer has {size} ids; "
                    f"leave it out for those"
                ]
            )
        return self.with_values("model", vocab_size=size)

    def with_values(self, section: str, **values: object) -> "RunConfig":
        """A copy with some settings of one section changed."""
        part = dataclasses.replace(getattr(self, section), **values)
        return dataclasses.replace(self, **{section: part})
