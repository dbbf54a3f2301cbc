from trainer.trackers import *
