"""Arguments of the interfaces: what must hold of them, and what may be read of them."""
