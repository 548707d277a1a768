"""What the tools share, each thing once. They import it; it imports none of them."""
