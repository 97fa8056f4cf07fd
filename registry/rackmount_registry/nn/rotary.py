"""Rotary position embedding (arXiv 2104.09864) and the ways in which checkpoints stretch it."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from rackmount_registry.config import ConfigReader, RopeConfig, rope
from rackmount_registry.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Rotary:
    """Rotation of the first `config.partial_rotary_factor` of `head_size` features.

    Types: default; linear (positions divided by a factor); llama3 (Llama 3.1's frequency bands);
    yarn (arXiv 2309.00071); dynamic, up to the length where it equals default: beyond, its values
    would depend on how long the sequence later becomes, so such a length is refused.
    """

    config: RopeConfig
    head_size: int
    max_position: int
    """Positions that the checkpoint claims to know."""
    interleaved: bool = False
    """Pairs are (2i, 2i + 1) rather than (i, i + half)."""

    @classmethod
    def from_config(
        cls,
        config: ConfigReader,
        head_size: int,
        *,
        interleaved: bool = False,
        default_theta: float = 1e4,
    ) -> "Rotary":
        """From config.json in either spelling, `rope_scaling` or `rope_parameters`; `default_theta`
        belongs to the architecture."""
        found = rope(config, default_theta)
        if int(head_size * found.partial_rotary_factor) % 2:
            raise config.error(
                "head_dim", f"must be even where features turn in pairs, and heads have {head_size}"
            )
        return cls(
            config=found,
            head_size=head_size,
            max_position=config.positive("max_position_embeddings"),
            interleaved=interleaved,
        )

    def table(self, num_positions: int) -> Tensor:
        """float32 [num_positions, 2, rotated / 2]: cosines, then sines, times the attention factor.

        Angles are products in float32, as models of this kind are trained with.
        """
        if self.config.rope_type == "dynamic" and num_positions > self.max_position:
            raise ConfigError(
                f"max_model_len={num_positions} is above max_position_embeddings="
                f"{self.max_position}, where dynamic rope begins to depend on the batch's history; "
                f"choose at most {self.max_position}"
            )
        angles = torch.outer(torch.arange(num_positions).float(), self.frequencies())
        return torch.stack((angles.cos(), angles.sin()), 1) * self.attention_factor()

    def frequencies(self) -> Tensor:
        """float32 [rotated / 2]: radians per position."""
        c = self.config
        rotated = int(self.head_size * c.partial_rotary_factor)
        exponents = torch.arange(0, rotated, 2).float() / rotated
        plain = 1.0 / (c.theta**exponents)
        match c.rope_type:
            case "default" | "dynamic":
                return plain
            case "linear":
                return plain / c.factor
            case "llama3":
                return _llama3(plain, c)
            case "yarn":
                return _yarn(plain, c, rotated)
        raise AssertionError(c.rope_type)

    def attention_factor(self) -> float:
        """Scale of cosines and sines: yarn's correction of the softmax temperature."""
        c = self.config
        if c.rope_type != "yarn":
            return 1.0
        if c.attention_factor is not None:
            return c.attention_factor
        if c.mscale and c.mscale_all_dim:
            return yarn_mscale(c.factor, c.mscale) / yarn_mscale(c.factor, c.mscale_all_dim)
        return yarn_mscale(c.factor)


def yarn_mscale(factor: float, mscale: float = 1.0) -> float:
    """Yarn's 0.1 m ln(s) + 1."""
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def _llama3(plain: Tensor, c: RopeConfig) -> Tensor:
    """Long wavelengths are divided by the factor, short ones kept, those between blended."""
    assert c.original_max_position and c.low_freq_factor and c.high_freq_factor
    turns = c.original_max_position * plain / (2 * math.pi)
    blend = (turns - c.low_freq_factor) / (c.high_freq_factor - c.low_freq_factor)
    mixed = (1 - blend) * plain / c.factor + blend * plain
    return torch.where(
        turns < c.low_freq_factor,
        plain / c.factor,
        torch.where(turns > c.high_freq_factor, plain, mixed),
    )


def _yarn(plain: Tensor, c: RopeConfig, rotated: int) -> Tensor:
    """Features that turn often keep their frequency, those that turn little are divided, with a
    ramp between."""
    assert c.original_max_position

    def feature(turns: float) -> float:
        """The feature that turns so often over the original length."""
        span = c.original_max_position / (turns * 2 * math.pi)  # type: ignore[operator]  # asserted above
        return rotated * math.log(span) / (2 * math.log(c.theta))

    low, high = feature(c.beta_fast), feature(c.beta_slow)
    if c.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rotated - 1)
    ramp = (torch.arange(rotated // 2).float() - low) / (high - low or 0.001)
    divided = ramp.clamp(0, 1)
    return plain / c.factor * divided + plain * (1 - divided)
