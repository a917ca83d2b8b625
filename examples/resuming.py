"""Train with Keras's `fit`, and resume after a crash, a lost node or a time limit.

The scheduler restarts the command, and all processes resume from the last backup:

    hvkeras run -np 2 --reset-limit 3 python examples/resuming.py
    torchrun --nproc-per-node 2 --max-restarts 3 examples/resuming.py
    cd examples && sbatch slurm/train.sbatch
    kubectl apply -f examples/kubernetes/indexed-job.yaml
"""

from __future__ import annotations

import argparse

import keras

import data
import hvkeras as hvd
from network import convolutional_network

options = argparse.ArgumentParser(description="Train, and resume where training stopped.")
options.add_argument("--backend", help="collective engine: auto (default), native, tfdist, horovod or local")
options.add_argument("--epochs", type=int, default=12)
options.add_argument("--batch-size", type=int, default=32, help="images per process and step (default: 32)")
options.add_argument("--backup-dir", default="backup", help="folder of the backups, which must outlive the job; only"
                     " rank 0 uses it (default: backup)")
options.add_argument("--save-freq", type=int, default=20, help="steps between two backups (default: 20)")
args = options.parse_args()

# 1. Find the other processes (ranks).
hvd.init(args.backend)
if hvd.rank() == 0:
    print(f"{hvd.size()} ranks", flush=True)

# 2. Use the same seed in every run, so that resumed training reads the data in the order of an uninterrupted run.
keras.utils.set_random_seed(1)
x_train, y_train, x_test, y_test = data.load("digits")
x_train, y_train = hvd.shard((x_train, y_train))
x_test, y_test = hvd.shard((x_test, y_test), training=False)

model = convolutional_network(x_train.shape[1:])
model.compile(
    optimizer=hvd.DistributedOptimizer(keras.optimizers.Adam(0.001 * hvd.size())),
    loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    metrics=["accuracy"],
)

# 3. `BackupAndRestore` removes the backup when training completes. If the job is killed or reaches its time limit, the
#    backup remains, and the next job resumes from it, with any number of processes.
model.fit(
    x_train, y_train, batch_size=args.batch_size, epochs=args.epochs, validation_data=(x_test, y_test),
    callbacks=[
        hvd.callbacks.BroadcastGlobalVariablesCallback(0),
        hvd.callbacks.BackupAndRestore(args.backup_dir, save_freq=args.save_freq),
    ],
    verbose=2 if hvd.rank() == 0 else 0,
)

test_loss, test_accuracy = model.evaluate(x_test, y_test, verbose=0)
if hvd.rank() == 0:
    print(f"test accuracy: {test_accuracy:.4f}", flush=True)

hvd.shutdown()
