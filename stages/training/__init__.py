"""What distill and qat share: teacher shards, batches, the loss, the loop."""
