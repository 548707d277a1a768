"""The cost model: what a method would gain on a device, by its datasheet."""
