"""The dated corpus: articles, monthly shards, masked exact search, and the view a forecast step holds."""
