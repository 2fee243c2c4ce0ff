"""Compares an ensemble with its best member on questions: answers, points, intervals, a verdict, a report."""

from specfuse_shared.comparing.combinations import Combination, Suggestion
from specfuse_shared.comparing.comparison import Comparison, compare
from specfuse_shared.comparing.equal_compute import EqualCompute
from specfuse_shared.comparing.intervals import Interval
from specfuse_shared.comparing.judging import Rating, Ratings, rate
from specfuse_shared.comparing.pages.voting import Votes, votes_on
from specfuse_shared.comparing.question_files import QuestionSet, own_questions, read_questions
from specfuse_shared.comparing.questions import Question
from specfuse_shared.comparing.run.asking import ENSEMBLE, Asker, OnProgress, Progress
from specfuse_shared.comparing.run.run_file import Answer
from specfuse_shared.comparing.run.sampling import Sampling
from specfuse_shared.comparing.scores import Column, Cost, Habits
from specfuse_shared.comparing.suggesting import suggest
from specfuse_shared.comparing.tuning import Tuned, tune, write_ensemble
from specfuse_shared.comparing.verdict import Point, Verdict

__all__ = [
    "ENSEMBLE",
    "Answer",
    "Asker",
    "Column",
    "Combination",
    "Comparison",
    "Cost",
    "EqualCompute",
    "Habits",
    "Interval",
    "OnProgress",
    "Point",
    "Progress",
    "Question",
    "QuestionSet",
    "Rating",
    "Ratings",
    "Sampling",
    "Suggestion",
    "Tuned",
    "Verdict",
    "Votes",
    "compare",
    "own_questions",
    "rate",
    "read_questions",
    "suggest",
    "tune",
    "votes_on",
    "write_ensemble",
]
