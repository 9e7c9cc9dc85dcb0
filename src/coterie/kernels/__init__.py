"""The device door: the operations of the model, the batch they run on, and the backends that compute them."""
