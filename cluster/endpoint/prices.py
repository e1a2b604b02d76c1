"""What a call costs: US dollars from the server's own token counts and the prices in the settings."""

from cluster.config import PriceSettings
from cluster.record import Record


class TokenCount(Record):
    """Tokens of one call, as the server counted them."""

    input: int = 0
    """The whole prompt, cached part included."""
    cached: int = 0
    """The part of the prompt that was read from a cache."""
    output: int = 0
    """Everything that was generated, hidden reasoning included."""


def price(count: TokenCount, prices: PriceSettings) -> float:
    """US dollars; 0 where no price is set. A cached token without a price of its own costs what any input token does."""
    cached = min(count.cached, count.input)
    cached_price = prices.input if prices.cached is None else prices.cached
    return ((count.input - cached) * prices.input + cached * cached_price + count.output * prices.output) / 1_000_000
