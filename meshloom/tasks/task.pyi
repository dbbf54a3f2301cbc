from trainer.tasks.task import *
