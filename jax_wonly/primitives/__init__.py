"""One file per operation, with its abstract evaluation, lowerings and transformation rules together."""
