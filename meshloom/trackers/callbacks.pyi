from trainer.trackers.callbacks import *
