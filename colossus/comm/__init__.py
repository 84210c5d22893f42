"""How values move between ranks: collectives, their conjugates under autograd, what they cost and what ran last."""
