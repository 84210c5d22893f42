"""Communication between ranks: collectives, their conjugates under autograd, their cost, and a log of the last."""
