from trainer.tasks.supervised import *
